//! Ends a process when its launcher ends, even if the launcher is killed.

use std::{
    ffi::{OsStr, OsString},
    os::unix::process::{CommandExt, parent_id},
    process::Command,
};

use candle_distributed::types::human::Printable;

use crate::error::{Error, Result};

/// Returns a command that runs `program` with `arguments` and ends with this process.
///
/// On Linux the command is this program again, which calls [`become_program`]: a process can set a
/// parent-death signal only for itself.
pub(super) fn command(program: &OsStr, arguments: &[OsString]) -> Command {
    let mut command;
    if cfg!(target_os = "linux") {
        // The file at `current_exe` may have been replaced since this program started.
        command = Command::new("/proc/self/exe");
        command
            .args(["launch", "--guarded-by", &std::process::id().to_string(), "--"])
            .arg(program);
    } else {
        command = Command::new(program);
    }
    command.args(arguments);
    command
}

/// Replaces this process by `program`, which is killed when its parent `launcher` ends.
///
/// Children of `program` do not inherit this, so they survive if the launcher is killed. The help
/// says so.
pub(super) fn become_program(launcher: u32, program: &OsStr, arguments: &[OsString]) -> Result<()> {
    let start_error =
        |source| Error::usage(format!("cannot start {}: {source}", Printable(program.display())));
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| start_error(error.into()))?;
    // If the launcher ended before the call above, no signal is sent.
    if parent_id() != launcher {
        return Err(Error::usage(format!("process {launcher} is not the parent of this process")));
    }
    Err(start_error(Command::new(program).args(arguments).exec()))
}
