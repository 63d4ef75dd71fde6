//! Starts, watches and ends the processes of a program.

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

/// Time to wait for output after all processes have ended, before a warning.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(2);

/// An event while the processes run. A thread per source waits for it, and sends it to the main
/// thread.
enum JobEvent {
    /// The process of this rank has ended.
    Ended(usize),
    /// One output of a process is closed, and all of it is written.
    Closed,
    /// The output of a process cannot be written.
    Unwritten(io::Error),
    /// The launcher received a signal.
    Signaled(Signal),
}

/// Times that processes may take to end before they are killed.
#[derive(Clone, Copy, Debug)]
pub(super) struct GracePeriods {
    /// After one process has ended, since the others may wait for it in vain.
    pub(super) grace: Duration,
    /// After a forwarded signal, since all processes may be saving their state.
    pub(super) stop_grace: Duration,
}

/// The processes of a program.
pub(super) struct ProcessGroup {
    /// The processes, by rank.
    processes: Vec<Process>,
    events: Receiver<JobEvent>,
    /// The original sender, cloned for each thread. It keeps the channel open.
    sender: Sender<JobEvent>,
    /// Number of outputs that are not closed yet.
    n_open: usize,
    periods: GracePeriods,
    /// Time to kill running processes, or to warn about open outputs if none are running.
    deadline: Option<Instant>,
    /// Whether the processes have received a signal and should exit.
    is_ending: bool,
    /// The first failure.
    fault: Option<ErrorKind>,
}

impl ProcessGroup {
    /// Starts the processes.
    ///
    /// Call it from the main thread: the system kills the processes when the thread that started
    /// them ends.
    pub(super) fn start(program: &Program<'_>, periods: GracePeriods) -> Result<Self> {
        let (sender, events) = mpsc::channel();
        // Handlers come first: a signal must not end this program and leave processes running.
        watch_signals(&sender).map_err(ErrorKind::launcher)?;
        let mut job = Self {
            processes: Vec::new(),
            events,
            sender,
            n_open: 0,
            periods,
            deadline: None,
            is_ending: false,
            fault: None,
        };
        for rank in 0..program.n_processes {
            let process = program.start(rank).map_err(ErrorKind::launcher)?;
            job.processes.push(process);
            job.watch_last().map_err(ErrorKind::launcher)?;
        }
        Ok(job)
    }

    /// Starts the threads that watch the last process.
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn watch_last(&mut self) -> io::Result<()> {
        let rank = self.processes.len() - 1;
        let process = self.processes.last_mut().expect("a process has just been added");
        let (stdout, stderr) = process.take_outputs();
        let pid = process.pid();
        self.n_open += 2;
        watch(&self.sender, move |sender| {
            send(sender, output_event(lines::forward(rank, stdout, io::stdout())));
        })?;
        watch(&self.sender, move |sender| {
            send(sender, output_event(lines::forward(rank, stderr, io::stderr())));
        })?;
        watch(&self.sender, move |sender| {
            process::wait(pid);
            send(sender, JobEvent::Ended(rank));
        })
    }

    /// Waits until all processes have ended and all their output is written.
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

    /// Waits for the next event. Returns `None` at the deadline.
    fn next_event(&self) -> Option<JobEvent> {
        // The channel is never disconnected, since `self.sender` keeps it open.
        match self.deadline {
            None => self.events.recv().ok(),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                self.events.recv_timeout(left).ok()
            }
        }
    }

    fn handle(&mut self, event: JobEvent) -> Result<()> {
        match event {
            JobEvent::Closed => self.n_open -= 1,
            JobEvent::Unwritten(error) => {
                self.n_open -= 1;
                self.end_because(error.into());
            }
            // Only output is left, and a signal ends the wait for it.
            JobEvent::Signaled(_) if !self.is_running() => self.n_open = 0,
            JobEvent::Signaled(signal) => {
                self.is_ending = true;
                self.signal(signal);
                self.expect_end(self.periods.stop_grace);
            }
            JobEvent::Ended(rank) => {
                let status = self.processes[rank].reap().map_err(ErrorKind::launcher)?;
                if let Some(fault) = process::exit_error(rank, status) {
                    self.end_because(fault);
                }
                if !self.is_running() {
                    self.deadline = Some(Instant::now() + OUTPUT_TIMEOUT);
                } else if self.is_ending {
                    self.expect_end(self.periods.grace);
                }
            }
        }
        Ok(())
    }

    /// Asks all processes to end because of `fault`, unless they are already ending.
    fn end_because(&mut self, fault: ErrorKind) {
        if !self.is_ending && self.is_running() {
            let seconds = self.periods.grace.as_secs();
            output::warning(format_args!(
                "{fault}; the other ranks get SIGTERM, and SIGKILL after {seconds} s"
            ));
            self.is_ending = true;
            self.signal(Signal::TERM);
            self.expect_end(self.periods.grace);
        }
        self.fault.get_or_insert(fault);
    }

    /// Sets the deadline to `period` from now, unless it is earlier already.
    fn expect_end(&mut self, period: Duration) {
        let deadline = Instant::now() + period;
        self.deadline = Some(self.deadline.map_or(deadline, |current| current.min(deadline)));
    }

    /// Kills all running processes.
    fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.deadline = None;
    }

    /// Warns that outputs are still open after all processes have ended.
    ///
    /// Either the reader of the output is slow, and no output may be lost, or a process that has
    /// left its process group keeps it open.
    fn warn_of_outputs(&mut self) {
        output::warning(
            "all ranks have ended, but their output is still open: waiting until it closes, or until \
             Ctrl-C",
        );
        self.deadline = None;
    }

    fn signal(&self, signal: Signal) {
        self.processes.iter().for_each(|process| process.signal(signal));
    }
}

/// Returns the event for the end of an output.
fn output_event(outcome: io::Result<()>) -> JobEvent {
    match outcome {
        Ok(()) => JobEvent::Closed,
        Err(error) => JobEvent::Unwritten(error),
    }
}

fn send(sender: &Sender<JobEvent>, event: JobEvent) {
    // The receiver is gone if the launcher ends because of an error.
    let _ = sender.send(event);
}

/// Starts a thread that runs `wait` with a clone of `sender`.
fn watch(
    sender: &Sender<JobEvent>,
    wait: impl FnOnce(&Sender<JobEvent>) + Send + 'static,
) -> io::Result<()> {
    let sender = sender.clone();
    thread::Builder::new().spawn(move || wait(&sender)).map(drop)
}

/// Converts signals that would end this program to events.
fn watch_signals(sender: &Sender<JobEvent>) -> io::Result<()> {
    let mut signals = Signals::new(stop::signals())?;
    watch(sender, move |sender| {
        for signal in signals.forever().filter_map(Signal::from_named_raw) {
            send(sender, JobEvent::Signaled(signal));
        }
    })
}
