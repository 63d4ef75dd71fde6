//! Processes that `mpirun` starts.

#![allow(
    clippy::print_stderr,
    reason = "without the test harness, nobody else says what was skipped"
)]

use std::{
    env,
    io::Read,
    process::{Command, ExitCode, Stdio},
    sync::mpsc,
    thread,
};

use core_types::Launched;

use crate::{Case, LIMIT};

/// The `main` of a test: starts every case under `mpirun`, and in a process that it has started
/// calls `run` with the name of the case and the number of ranks.
pub fn main(cases: &[Case], run: impl FnOnce(&str, usize)) -> ExitCode {
    if let Some(launched) = Launched::from_env().unwrap() {
        run(&env::args().nth(1).unwrap(), launched.placement().world_size().as_usize());
    } else if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no mpirun; nothing was checked");
    } else {
        cases.iter().for_each(launch);
    }
    ExitCode::SUCCESS
}

/// Runs a case, and checks how it ends.
fn launch(case: &Case) {
    let Case { name, ranks, .. } = *case;
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("mpirun");
    command
        .args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()])
        .arg(env::current_exe().unwrap())
        .arg(name)
        .arg(folder.path())
        .env("RAYON_NUM_THREADS", "1")
        .env("CANDLE_NUM_THREADS", "1");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        sender.send(text).unwrap();
    });
    // The text ends when all processes have ended.
    let Ok(text) = receiver.recv_timeout(LIMIT) else {
        child.kill().unwrap();
        panic!("{name} on {ranks} ranks has not ended after {LIMIT:?}");
    };
    case.check(ranks, child.wait().unwrap().success(), &text);
}
