//! One process per slot gives what one thread per slot gives, to the bit; and no process outlives another's failure.
//!
//! The program starts itself under `mpirun`, once for each case; what runs there is one of several ranks. The model is the
//! engine of threads, which `collectives.rs` compares with a serial one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "without the test harness, nobody else says what was run")]

mod conformance;

use std::{
    env,
    io::Read,
    process::{Command, ExitCode, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use candle_core::Device;
use core_types::Launched;
use pmap_mesh::{DeviceMesh, DeviceMeshBuilder};

/// How long a case may take before it counts as a hang; MPI's processes spin, and more of them than cores are slow.
const LIMIT: Duration = Duration::from_mins(4);

/// Name, number of ranks, and what must be said on the standard error: of success, or of why all ended.
const CASES: [(&str, usize, std::result::Result<(), &str>); 15] = [
    ("collectives", 2, Ok(())),
    ("collectives", 4, Ok(())),
    ("training", 2, Ok(())),
    ("training", 3, Ok(())),
    ("failure", 2, Err("rank 1: replica 1 on Cpu failed: no more data")),
    ("panic", 2, Err("this one breaks")),
    ("deadline", 2, Err("replica 1 did not come")),
    ("crosswise", 4, Err("did not come")),
    ("checkpoints", 2, Ok(())),
    ("checkpoints", 3, Ok(())),
    ("sharded", 2, Ok(())),
    ("sharded", 4, Ok(())),
    ("mismatch", 2, Err("replica 1 calls pmax of f32 [70000]")),
    ("deserted", 2, Err("replica 1 calls the end of the function")),
    ("killed", 3, Err("")),
];

struct Mpi;

impl conformance::Engine for Mpi {
    fn open(&self, builder: DeviceMeshBuilder) -> DeviceMesh {
        builder.mpi(self.device()).unwrap()
    }

    fn device(&self) -> Device {
        Device::Cpu
    }
}

fn main() -> ExitCode {
    match Launched::from_env().unwrap() {
        Some(launched) => {
            conformance::run(&Mpi, &env::args().nth(1).unwrap(), launched.placement().world_size().as_usize());
        }
        None if Command::new("mpirun").arg("--version").output().is_err() => {
            eprintln!("SKIPPED: there is no mpirun; nothing was checked");
        }
        None => CASES.iter().for_each(|(name, ranks, expected)| launch(name, *ranks, *expected)),
    }
    ExitCode::SUCCESS
}

/// Runs a case on so many ranks, and checks how it ends.
fn launch(name: &str, ranks: usize, expected: std::result::Result<(), &str>) {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()]);
    let folder = tempfile::tempdir().unwrap();
    command
        .arg(env::current_exe().unwrap())
        .arg(name)
        .arg(folder.path())
        .env("RAYON_NUM_THREADS", "1")
        .env("CANDLE_NUM_THREADS", "1");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let (sender, said) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        sender.send(text).unwrap();
    });
    // Nothing is said to the end before all processes have ended.
    let Ok(said) = said.recv_timeout(LIMIT) else {
        child.kill().unwrap();
        panic!("{name} on {ranks} ranks has not ended after {LIMIT:?}");
    };
    let succeeded = child.wait().unwrap().success();
    match expected {
        Ok(()) => assert!(succeeded, "{name} on {ranks} ranks: {said}"),
        Err(reason) => assert!(!succeeded && said.contains(reason), "{name} on {ranks} ranks: {said}"),
    }
    println!("{name} on {ranks} ranks ... ok");
}
