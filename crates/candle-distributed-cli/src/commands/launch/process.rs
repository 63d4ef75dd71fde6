//! The process of one rank.

use std::{
    ffi::{OsStr, OsString},
    io,
    net::Ipv4Addr,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::PathBuf,
    process::{Child, ChildStderr, ChildStdout, ExitStatus, Stdio},
};

use rustix::{
    io::retry_on_intr,
    process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid},
};
use signal_hook::low_level::signal_name;

use super::guard;
use crate::{devices::STORE_VARIABLE, error::ErrorKind};

/// What is started, and what all its processes are told.
pub(super) struct Program<'a> {
    pub(super) name: &'a OsStr,
    pub(super) arguments: &'a [OsString],
    pub(super) n_processes: u16,
    pub(super) port: u16,
    pub(super) store: PathBuf,
}

impl Program<'_> {
    /// Starts the process of `rank`, which is a number below that of the processes.
    ///
    /// It leads a process group, so that what it starts is reached with it. Standard input is empty:
    /// there is one, and several processes would read parts of it.
    pub(super) fn start(&self, rank: u16) -> io::Result<Process> {
        let n_processes = self.n_processes.to_string();
        let rank = rank.to_string();
        let child = guard::command(self.name, self.arguments)
            .envs([("RANK", &rank), ("LOCAL_RANK", &rank)])
            .envs([("WORLD_SIZE", &n_processes), ("LOCAL_WORLD_SIZE", &n_processes)])
            .env("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string())
            .env("MASTER_PORT", self.port.to_string())
            .env(STORE_VARIABLE, &self.store)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Process { child, is_running: true })
    }
}

/// A process that was started. When this is dropped, the process is killed if it still runs.
pub(super) struct Process {
    child: Child,
    is_running: bool,
}

impl Process {
    /// What it prints.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    pub(super) fn take_outputs(&mut self) -> (ChildStdout, ChildStderr) {
        let stdout = self.child.stdout.take().expect("started with a pipe, and taken once");
        let stderr = self.child.stderr.take().expect("started with a pipe, and taken once");
        (stdout, stderr)
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Whether it runs, as far as [`reap`](Self::reap) has been told.
    pub(super) fn is_running(&self) -> bool {
        self.is_running
    }

    /// Sends `signal` to the process and to all that it has started, if it runs.
    pub(super) fn signal(&self, signal: Signal) {
        if self.is_running {
            // Its group exists until it is reaped. The system refuses only what the process has
            // asked for itself, by running as another user.
            let _ = kill_process_group(self.pid(), signal);
        }
    }

    /// How the process has ended, after what it left running is killed.
    pub(super) fn reap(&mut self) -> io::Result<ExitStatus> {
        self.signal(Signal::KILL);
        self.is_running = false;
        self.child.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.is_running {
            // What is to be told has been told; this leaves nothing behind.
            let _ = self.reap();
        }
    }
}

/// Waits until the process has ended, and leaves it to be reaped: until then nothing else can get
/// its number.
pub(super) fn wait(pid: Pid) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    // A failure would mean that there is no such process, and reaping it then waits itself.
    let _ = retry_on_intr(|| waitid(WaitId::Pid(pid), options));
}

/// The error that this end of `rank` is, or `None` if it is a success.
pub(super) fn failure(rank: usize, status: ExitStatus) -> Option<ErrorKind> {
    if status.success() {
        return None;
    }
    let (how, code) = match (status.code(), status.signal()) {
        (Some(code), _) => (format!("ended with exit code {code}"), code),
        (None, Some(signal)) => {
            let name = signal_name(signal).unwrap_or("no name");
            (format!("was ended by signal {signal} ({name})"), 128 + signal)
        }
        (None, None) => (format!("ended: {status}"), 1),
    };
    Some(ErrorKind::Rank { rank, how, code: u8::try_from(code).unwrap_or(u8::MAX) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_named_with_its_code_or_signal() {
        let of = |status| failure(3, ExitStatus::from_raw(status));
        assert!(of(0).is_none());
        for (raw, message, expected) in [
            (7 << 8, "rank 3 ended with exit code 7", 7),
            (255 << 8, "rank 3 ended with exit code 255", 255),
            (9, "rank 3 was ended by signal 9 (SIGKILL)", 137),
            (15, "rank 3 was ended by signal 15 (SIGTERM)", 143),
        ] {
            let error = of(raw).unwrap();
            assert_eq!(error.to_string(), message);
            assert!(matches!(error, ErrorKind::Rank { code, .. } if code == expected));
        }
    }
}
