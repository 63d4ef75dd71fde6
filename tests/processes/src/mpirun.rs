//! Processes that `mpirun` starts.

#![allow(clippy::print_stderr, reason = "these programs have no test harness to report skips")]

use std::{
    env,
    io::Read,
    process::{Command, ExitCode, Stdio},
    sync::mpsc,
    thread,
};

use core_types::LaunchEnv;

use crate::{Case, LIMIT};

/// Starts every case under `mpirun`. In the started processes, calls `run` with the name of the
/// case and the number of ranks instead.
pub fn main(cases: &[Case], run: impl FnOnce(&str, usize)) -> ExitCode {
    main_and_then(cases, run, || ())
}

/// Does the same as [`main`], then calls `more` in the process that started the cases.
pub fn main_and_then(
    cases: &[Case],
    run: impl FnOnce(&str, usize),
    more: impl FnOnce(),
) -> ExitCode {
    if let Some(launched) = LaunchEnv::from_env().unwrap() {
        run(&env::args().nth(1).unwrap(), launched.placement().world_size().as_usize());
    } else if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("SKIPPED: mpirun not found; nothing was checked");
    } else {
        for case in cases {
            let (succeeded, stderr) = outcome(case.name, case.ranks);
            case.check(case.ranks, succeeded, &stderr);
        }
        more();
    }
    ExitCode::SUCCESS
}

/// Runs a case on `ranks` processes. Returns true if all succeeded, and their standard error.
///
/// # Panics
///
/// If the processes do not exit in time.
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
    // Standard error ends when all processes have exited.
    let Ok(text) = receiver.recv_timeout(LIMIT) else {
        child.kill().unwrap();
        panic!("{name} on {ranks} ranks did not exit within {LIMIT:?}");
    };
    (child.wait().unwrap().success(), text)
}
