//! How a process ends with its launcher, however that ends.

use std::{
    ffi::{OsStr, OsString},
    os::unix::process::{CommandExt, parent_id},
    process::Command,
};

use candle_distributed::types::human::Printable;

use crate::error::{Error, Result};

/// A command that becomes `program` with `arguments`, and ends when this process does.
///
/// On Linux it is this program once more, which calls [`become_program`]: what a process asks of its
/// own end it can ask only by itself.
pub(super) fn command(program: &OsStr, arguments: &[OsString]) -> Command {
    let mut command;
    if cfg!(target_os = "linux") {
        // Not `current_exe`, which may have been replaced since.
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

/// Replaces this process by `program`, which is killed when `launcher`, its parent, ends. Its own
/// children do not inherit that, and outlive a launcher that can no longer end them: the help says
/// so.
pub(super) fn become_program(launcher: u32, program: &OsStr, arguments: &[OsString]) -> Result<()> {
    let failed =
        |source| Error::usage(format!("cannot start {}: {source}", Printable(program.display())));
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| failed(error.into()))?;
    // If the launcher has ended before this was asked for, nobody sends the signal.
    if parent_id() != launcher {
        return Err(Error::usage(format!("process {launcher} has not started this one")));
    }
    Err(failed(Command::new(program).args(arguments).exec()))
}
