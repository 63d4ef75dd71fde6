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

/// The program to start, and the settings that all its processes share.
pub(super) struct Program<'a> {
    pub(super) name: &'a OsStr,
    pub(super) arguments: &'a [OsString],
    pub(super) n_processes: u16,
    pub(super) port: u16,
    pub(super) store: PathBuf,
}

impl Program<'_> {
    /// Starts the process of `rank`, which must be less than the number of processes.
    ///
    /// The process leads a process group, so that signals reach its children too. Standard input is
    /// empty, since several processes would each read a part of it.
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

/// A started process. Dropping it kills the process if it still runs.
pub(super) struct Process {
    child: Child,
    is_running: bool,
}

impl Process {
    /// Takes standard output and standard error. Call it once.
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    pub(super) fn take_outputs(&mut self) -> (ChildStdout, ChildStderr) {
        let stdout = self.child.stdout.take().expect("piped at start, and taken only once");
        let stderr = self.child.stderr.take().expect("piped at start, and taken only once");
        (stdout, stderr)
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns true until [`reap`](Self::reap) is called.
    pub(super) fn is_running(&self) -> bool {
        self.is_running
    }

    /// Sends `signal` to the process and its children, if it runs.
    pub(super) fn signal(&self, signal: Signal) {
        if self.is_running {
            // The group exists until the process is reaped. The call fails only if the process has
            // switched to another user.
            let _ = kill_process_group(self.pid(), signal);
        }
    }

    /// Kills the remaining processes of the group, and returns the exit status.
    pub(super) fn reap(&mut self) -> io::Result<ExitStatus> {
        self.signal(Signal::KILL);
        self.is_running = false;
        self.child.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.is_running {
            // An error has already been reported. This only cleans up.
            let _ = self.reap();
        }
    }
}

/// Waits until the process has ended, without reaping it: until then, the system does not reuse its
/// process id.
pub(super) fn wait(pid: Pid) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    // A failure means that the process does not exist. `reap` then waits instead.
    let _ = retry_on_intr(|| waitid(WaitId::Pid(pid), options));
}

/// Returns the error for an exit status of `rank`, or `None` for success.
pub(super) fn exit_error(rank: usize, status: ExitStatus) -> Option<ErrorKind> {
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
    fn exit_error_names_code_or_signal() {
        let failed = |status| exit_error(3, ExitStatus::from_raw(status));
        assert!(failed(0).is_none());
        for (raw, message, expected) in [
            (7 << 8, "rank 3 ended with exit code 7", 7),
            (255 << 8, "rank 3 ended with exit code 255", 255),
            (9, "rank 3 was ended by signal 9 (SIGKILL)", 137),
            (15, "rank 3 was ended by signal 15 (SIGTERM)", 143),
        ] {
            let error = failed(raw).unwrap();
            assert_eq!(error.to_string(), message);
            assert!(matches!(error, ErrorKind::Rank { code, .. } if code == expected));
        }
    }
}
