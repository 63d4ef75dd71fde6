//! All processes of a program, from their start to their end.

use std::{
    io,
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use signal_hook::iterator::Signals;

use super::{
    lines,
    process::{self, Process, Program},
};
use crate::{
    error::{ErrorKind, Result},
    output,
    train::stop,
};

/// How long to wait without a word for output when all processes have ended.
const OUTPUT_PATIENCE: Duration = Duration::from_secs(2);

/// What happens while the processes run. Threads wait for each kind, and send it to the main one.
enum Event {
    /// The process of this rank has ended.
    Ended(usize),
    /// All that came from one output of a process is written.
    Closed,
    /// What a process printed cannot be written.
    Unwritten(io::Error),
    /// The launcher was sent a signal.
    Signaled(Signal),
}

/// How long processes may take to end before they are killed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// After one of them has ended: the others may wait for it in vain.
    pub(super) grace: Duration,
    /// After a signal that is passed on: all of them may be busy with what they save.
    pub(super) stop_grace: Duration,
}

/// The processes of a program.
pub(super) struct Job {
    /// By rank.
    processes: Vec<Process>,
    events: Receiver<Event>,
    /// Threads get a copy each. This one keeps the receiver from running dry.
    sender: Sender<Event>,
    /// How many of their outputs are not closed yet.
    n_open: usize,
    patience: Patience,
    /// When to kill what has not ended by then; when nothing runs, when to say what is waited for.
    deadline: Option<Instant>,
    /// Whether the processes have been sent a signal and should end by themselves.
    is_ending: bool,
    /// Why the program has failed; the first of several reasons.
    fault: Option<ErrorKind>,
}

impl Job {
    /// Starts the processes. Call it from the main thread: the system ends them when the thread ends
    /// that has started them.
    pub(super) fn start(program: &Program<'_>, patience: Patience) -> Result<Self> {
        let (sender, events) = mpsc::channel();
        // Before the first process, which a signal must not leave behind.
        watch_signals(&sender).map_err(ErrorKind::Launcher)?;
        let mut job = Self {
            processes: Vec::new(),
            events,
            sender,
            n_open: 0,
            patience,
            deadline: None,
            is_ending: false,
            fault: None,
        };
        for rank in 0..program.n_processes {
            let process = program.start(rank).map_err(ErrorKind::Launcher)?;
            job.processes.push(process);
            job.watch_last().map_err(ErrorKind::Launcher)?;
        }
        Ok(job)
    }

    /// Starts the threads that wait for the process started last.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    fn watch_last(&mut self) -> io::Result<()> {
        let rank = self.processes.len() - 1;
        let process = self.processes.last_mut().expect("a process has just been added");
        let (stdout, stderr) = process.take_outputs();
        let pid = process.pid();
        self.n_open += 2;
        watch(&self.sender, move |sender| {
            send(sender, closed(lines::pass_on(rank, stdout, io::stdout())));
        })?;
        watch(&self.sender, move |sender| {
            send(sender, closed(lines::pass_on(rank, stderr, io::stderr())));
        })?;
        watch(&self.sender, move |sender| {
            process::wait(pid);
            send(sender, Event::Ended(rank));
        })
    }

    /// Waits until all processes have ended and all they printed is written.
    pub(super) fn watch(mut self) -> Result<()> {
        while self.is_running() || self.n_open > 0 {
            match self.next_event() {
                Some(event) => self.handle(event)?,
                None if self.is_running() => self.kill(),
                None => self.warn_of_outputs(),
            }
        }
        self.fault.map_or(Ok(()), |fault| Err(fault.into()))
    }

    fn is_running(&self) -> bool {
        self.processes.iter().any(Process::is_running)
    }

    /// The next event, or `None` if the deadline comes first.
    fn next_event(&self) -> Option<Event> {
        // Neither of the two fails for want of a sender, since there is one here.
        match self.deadline {
            None => self.events.recv().ok(),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                self.events.recv_timeout(left).ok()
            }
        }
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Closed => self.n_open -= 1,
            Event::Unwritten(error) => {
                self.n_open -= 1;
                self.end_because(ErrorKind::Output(error));
            }
            // There is only output left to wait for.
            Event::Signaled(_) if !self.is_running() => self.n_open = 0,
            Event::Signaled(signal) => {
                self.is_ending = true;
                self.signal(signal);
                self.expect_end(self.patience.stop_grace);
            }
            Event::Ended(rank) => {
                let status = self.processes[rank].reap().map_err(ErrorKind::Launcher)?;
                if let Some(fault) = process::failure(rank, status) {
                    self.end_because(fault);
                }
                if !self.is_running() {
                    self.deadline = Some(Instant::now() + OUTPUT_PATIENCE);
                } else if self.is_ending {
                    self.expect_end(self.patience.grace);
                }
            }
        }
        Ok(())
    }

    /// Asks all processes to end, unless they are about to.
    fn end_because(&mut self, fault: ErrorKind) {
        if !self.is_ending && self.is_running() {
            let seconds = self.patience.grace.as_secs();
            output::warning(format_args!(
                "{fault}; the others get SIGTERM, and SIGKILL after {seconds} s"
            ));
            self.is_ending = true;
            self.signal(Signal::TERM);
            self.expect_end(self.patience.grace);
        }
        self.fault.get_or_insert(fault);
    }

    /// From now on the processes have this long at most: what comes later does not give them more.
    fn expect_end(&mut self, within: Duration) {
        let deadline = Instant::now() + within;
        self.deadline = Some(self.deadline.map_or(deadline, |known| known.min(deadline)));
    }

    /// Kills what runs.
    fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.deadline = None;
    }

    /// Says why this takes so long: either the output is read slowly, and none of it must be lost,
    /// or a process that has left its group has not closed it.
    fn warn_of_outputs(&mut self) {
        output::warning(
            "all ranks have ended, but not all that they have started: their output is still open, \
             and is waited for until Ctrl-C",
        );
        self.deadline = None;
    }

    fn signal(&self, signal: Signal) {
        self.processes.iter().for_each(|process| process.signal(signal));
    }
}

/// The end of an output.
fn closed(written: io::Result<()>) -> Event {
    match written {
        Ok(()) => Event::Closed,
        Err(error) => Event::Unwritten(error),
    }
}

fn send(sender: &Sender<Event>, event: Event) {
    // There is no receiver any more if the launcher ends on an error of its own.
    let _ = sender.send(event);
}

/// Lets a thread wait for something.
fn watch(
    sender: &Sender<Event>,
    wait: impl FnOnce(&Sender<Event>) + Send + 'static,
) -> io::Result<()> {
    let sender = sender.clone();
    thread::Builder::new().spawn(move || wait(&sender)).map(drop)
}

/// Sends the signals that ask this program to end, instead of ending it.
fn watch_signals(sender: &Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new(stop::signals())?;
    watch(sender, move |sender| {
        for signal in signals.forever().filter_map(Signal::from_named_raw) {
            send(sender, Event::Signaled(signal));
        }
    })
}
