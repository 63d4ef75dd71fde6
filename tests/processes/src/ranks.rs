//! Processes that the test starts itself, as a launcher does: one for each GPU.

#![allow(
    clippy::print_stderr,
    reason = "without the test harness, nobody else says what was skipped"
)]

use std::{
    env,
    fs::{self, File},
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use core_types::LaunchEnv;

use crate::{Case, LIMIT};

/// How often to look whether a process has ended.
const LOOK: Duration = Duration::from_millis(20);

/// The `main` of a test: starts every case on all `devices`, and in a process that it has started
/// calls `run` with what the launcher says, the name of the case and the number of ranks.
pub fn main(cases: &[Case], devices: usize, run: impl FnOnce(LaunchEnv, &str, usize)) -> ExitCode {
    if let Some(launched) = LaunchEnv::from_env().unwrap() {
        run(launched, &env::args().nth(1).unwrap(), launched.placement().world_size().as_usize());
    } else if devices == 0 {
        eprintln!("SKIPPED: there is no device; nothing was checked");
    } else {
        for case in cases {
            launch_on(case, devices);
        }
    }
    ExitCode::SUCCESS
}

/// Runs a case on all devices, and on two of them if there are more.
fn launch_on(case: &Case, devices: usize) {
    if case.ranks > devices {
        eprintln!("SKIPPED: {} takes {} devices, there are {devices}", case.name, case.ranks);
        return;
    }
    launch(case, devices);
    if devices > 2 {
        launch(case, 2);
    }
}

/// Runs a case on so many ranks, and checks how it ends.
fn launch(case: &Case, ranks: usize) {
    let folder = tempfile::tempdir().unwrap();
    let log = |rank: usize| folder.path().join(format!("log-{rank}"));
    let mut children: Vec<Child> =
        (0..ranks).map(|rank| start(case.name, rank, ranks, folder.path(), &log(rank))).collect();
    let succeeded = wait(&mut children);
    let stderr: String = (0..ranks).map(|rank| fs::read_to_string(log(rank)).unwrap()).collect();
    match succeeded {
        Some(succeeded) => case.check(ranks, succeeded, &stderr),
        None => panic!("{} on {ranks} ranks has not ended after {LIMIT:?}: {stderr}", case.name),
    }
}

fn start(name: &str, rank: usize, ranks: usize, folder: &Path, log: &Path) -> Child {
    let variables =
        [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)];
    let mut command = Command::new(env::current_exe().unwrap());
    command.arg(name).arg(folder);
    for (variable, value) in variables {
        command.env(variable, value.to_string());
    }
    command.stdout(Stdio::null()).stderr(File::create(log).unwrap()).spawn().unwrap()
}

/// Whether all have succeeded; when one has failed, the others are ended. `None` if they take too
/// long.
fn wait(children: &mut [Child]) -> Option<bool> {
    let start = Instant::now();
    loop {
        let ends: Vec<Option<bool>> = children
            .iter_mut()
            .map(|child| child.try_wait().unwrap().map(|status| status.success()))
            .collect();
        if ends.iter().all(|end| *end == Some(true)) {
            return Some(true);
        }
        let failed = ends.contains(&Some(false));
        if failed || start.elapsed() > LIMIT {
            children.iter_mut().for_each(end);
            return failed.then_some(false);
        }
        thread::sleep(LOOK);
    }
}

fn end(child: &mut Child) {
    // One that has ended cannot be killed.
    drop(child.kill());
    child.wait().unwrap();
}
