//! `launch`: a program as several processes of this machine, each of which is told its rank.
//!
//! `torchrun --standalone --nproc-per-node N` does the same; unlike it, `launch` does not start a
//! program again that has failed.

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
    job::{Job, Patience},
    process::Program,
};
use crate::{
    error::{Error, ErrorKind, Result},
    help::examples,
};

/// Start a program as several processes of this machine, each with its rank.
///
/// Every process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT
/// in its environment, as under torchrun, and in CANDLE_DISTRIBUTED_STORE the path of a file that does
/// not exist yet, by which the processes of a mesh over NCCL find each other. What rank 1 prints
/// appears as "[1] ...". If a process fails, the others are ended, and its exit code is that of
/// `launch`. SIGINT, SIGTERM and SIGHUP are passed on, and what has not ended --stop-grace seconds
/// later is killed. What a process has started ends with it. If the launcher itself is killed,
/// Linux ends the processes too, but not what they have started, such as the workers of a script.
#[derive(Debug, clap::Args)]
#[expect(clippy::doc_markdown, reason = "clap shows it as it is")]
#[command(after_help = examples![
    "# What does each process find in its environment?"
    "candle-distributed launch --processes 2 -- bash -c 'echo rank $RANK of $WORLD_SIZE'"
    "# The share of each rank of a data set"
    "candle-distributed launch --processes 2 -- bash -c 'candle-distributed sample --len 6 --world-size $WORLD_SIZE --rank $RANK'"
])]
pub(crate) struct Args {
    /// Number of processes, at most 1024
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u16).range(1..=1024),
        required_unless_present = "guarded_by"
    )]
    processes: Option<u16>,
    /// How long the other processes may take to end when one of them has failed, or has ended after
    /// a signal, before they are killed
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u32,
    /// How long processes may take to end after a signal that is passed on, such as Ctrl-C, before
    /// they are killed: enough for a step and a checkpoint
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    stop_grace: u32,
    /// The process id of the launcher: this process is to become the program, and to end with it
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

pub(crate) fn run(args: &Args) -> Result<()> {
    let (name, arguments) = split(&args.command);
    if let Some(launcher) = args.guarded_by {
        return guard::become_program(launcher, name, arguments);
    }
    refuse_nesting()?;
    refuse_missing(name)?;
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
    let patience = Patience {
        grace: Duration::from_secs(args.grace.into()),
        stop_grace: Duration::from_secs(args.stop_grace.into()),
    };
    Job::start(&program, patience)?.watch()
}

impl Args {
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    fn n_processes(&self) -> u16 {
        self.processes.expect("clap insists on --processes unless there is --guarded-by")
    }
}

/// The program and its arguments.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
fn split(command: &[OsString]) -> (&OsStr, &[OsString]) {
    let (name, arguments) = command.split_first().expect("clap insists on a program");
    (name, arguments)
}

/// Refuses to start ranks in what is a rank already: their variables would contradict those that
/// they inherit.
fn refuse_nesting() -> Result<()> {
    let Some(launched) = LaunchEnv::from_env()? else { return Ok(()) };
    Err(Error::usage(format!(
        "this process is {} already, by the variables of {}: launch starts the ranks itself, and \
         not inside of another launcher",
        launched.placement(),
        launched.launcher()
    )))
}

/// Refuses a program that does not exist. Without this every process would say so.
fn refuse_missing(name: &OsStr) -> Result<()> {
    let path = Path::new(name);
    let is_there = if path.components().count() > 1 {
        path.exists()
    } else {
        // Without the variable the system looks into these.
        let folders = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
        env::split_paths(&folders).any(|folder| folder.join(path).is_file())
    };
    if is_there {
        return Ok(());
    }
    Err(Error::usage(format!("there is no program {}", Printable(path.display()))))
}

/// A port of this machine that nobody listens on.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(ErrorKind::Launcher)?;
    Ok(listener.local_addr().map_err(ErrorKind::Launcher)?.port())
}
