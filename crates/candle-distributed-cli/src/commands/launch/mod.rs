//! `launch`: runs a program as several processes on this machine, one per rank.
//!
//! `torchrun --standalone --nproc-per-node N` does the same, but also restarts a failed program,
//! which `launch` does not.

mod guard;
mod job;
mod lines;
mod process;

use std::{
    env,
    ffi::{OsStr, OsString},
    net::{Ipv4Addr, TcpListener},
    path::Path,
    time::Duration,
};

use candle_distributed::types::{LaunchEnv, human::Printable};

use self::{
    job::{GracePeriods, ProcessGroup},
    process::Program,
};
use crate::{
    error::{Error, ErrorKind, Result},
    help::examples,
};

/// Start a program as several processes on this machine, one per rank.
///
/// A program over MPI needs mpirun or srun instead. The environment of each process has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
/// and MASTER_PORT, as under torchrun. CANDLE_DISTRIBUTED_STORE is the path of a new rendezvous
/// file for --engine nccl. Output of rank 1 appears as "[1] ...". If a process fails, launch ends
/// the others and returns its exit code. SIGINT, SIGTERM and SIGHUP are forwarded to all processes,
/// and processes that still run --stop-grace seconds later are killed. A process ends together with
/// its child processes. If the launcher itself is killed, Linux ends the processes too, but not
/// their children, such as the workers of a script.
#[derive(Debug, clap::Args)]
#[expect(clippy::doc_markdown, reason = "clap shows it as it is")]
#[command(after_help = examples![
    "# Print the rank of each process"
    "candle-distributed launch --processes 2 -- bash -c 'echo rank $RANK of $WORLD_SIZE'"
    "# Print the samples of each rank"
    "candle-distributed launch --processes 2 -- bash -c 'candle-distributed sample --len 6 --world-size $WORLD_SIZE --rank $RANK'"
])]
pub(crate) struct LaunchArgs {
    /// Number of processes, at most 1024
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u16).range(1..=1024),
        required_unless_present = "guarded_by"
    )]
    processes: Option<u16>,
    /// Seconds until the other processes are killed after one has failed, or has ended after a
    /// signal
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u32,
    /// Seconds until processes are killed after a forwarded signal, such as Ctrl-C: enough for a
    /// step and a checkpoint
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    stop_grace: u32,
    /// Process id of the launcher: run the program in this process, and end with the launcher
    #[arg(
        long,
        value_name = "PID",
        hide = true,
        conflicts_with_all = ["processes", "grace", "stop_grace"]
    )]
    guarded_by: Option<u32>,
    /// Program to start, and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

pub(crate) fn run(args: &LaunchArgs) -> Result<()> {
    let (name, arguments) = split(&args.command);
    if let Some(launcher) = args.guarded_by {
        return guard::become_program(launcher, name, arguments);
    }
    check_not_nested()?;
    check_exists(name)?;
    let folder = tempfile::Builder::new()
        .prefix("candle-distributed-")
        .tempdir()
        .map_err(|source| Error::write(env::temp_dir(), source))?;
    let program = Program {
        name,
        arguments,
        n_processes: args.n_processes(),
        port: free_port()?,
        store: folder.path().join("store"),
    };
    let periods = GracePeriods {
        grace: Duration::from_secs(args.grace.into()),
        stop_grace: Duration::from_secs(args.stop_grace.into()),
    };
    ProcessGroup::start(&program, periods)?.watch()
}

impl LaunchArgs {
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn n_processes(&self) -> u16 {
        self.processes.expect("clap requires --processes unless there is --guarded-by")
    }
}

/// Splits a command into the program and its arguments.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn split(command: &[OsString]) -> (&OsStr, &[OsString]) {
    let (name, arguments) = command.split_first().expect("clap requires a program");
    (name, arguments)
}

/// Rejects a process that is already a rank: the variables of new ranks would contradict the
/// inherited ones.
fn check_not_nested() -> Result<()> {
    let Some(launched) = LaunchEnv::from_env()? else { return Ok(()) };
    Err(Error::usage(format!(
        "this process is already {} according to the variables of {}: launch starts the ranks \
         itself, and cannot run inside another launcher",
        launched.placement(),
        launched.launcher()
    )))
}

/// Rejects a missing program once, before every process reports it.
fn check_exists(name: &OsStr) -> Result<()> {
    let path = Path::new(name);
    let exists = if path.components().count() > 1 {
        path.exists()
    } else {
        // The system's default search path.
        let folders = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
        env::split_paths(&folders).any(|folder| folder.join(path).is_file())
    };
    if exists {
        return Ok(());
    }
    Err(Error::usage(format!("there is no program {}", Printable(path.display()))))
}

/// Returns an unused port of this machine.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(ErrorKind::launcher)?;
    Ok(listener.local_addr().map_err(ErrorKind::launcher)?.port())
}
