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

use core_types::LaunchEnv;

use crate::{Case, LIMIT};

/// The `main` of a test: starts every case under `mpirun`, and in a process that it has started
/// calls `run` with the name of the case and the number of ranks.
pub fn main(cases: &[Case], run: impl FnOnce(&str, usize)) -> ExitCode {
    main_and_then(cases, run, || ())
}

/// [`main`], with more to be done after the cases where they are started.
pub fn main_and_then(
    cases: &[Case],
    run: impl FnOnce(&str, usize),
    more: impl FnOnce(),
) -> ExitCode {
    if let Some(launched) = LaunchEnv::from_env().unwrap() {
        run(&env::args().nth(1).unwrap(), launched.placement().world_size().as_usize());
    } else if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no mpirun; nothing was checked");
    } else {
        for case in cases {
            let (succeeded, stderr) = outcome(case.name, case.ranks);
            case.check(case.ranks, succeeded, &stderr);
        }
        more();
    }
    ExitCode::SUCCESS
}

/// Whether so many processes run a case with success, and what they say on standard error.
///
/// # Panics
///
/// If they do not end.
pub fn outcome(name: &str, ranks: usize) -> (bool, String) {
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
    (child.wait().unwrap().success(), text)
}
