//! Processes that the test starts like a launcher: one for each GPU.

#![allow(clippy::print_stderr, reason = "these programs have no test harness to report skips")]

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

/// Interval between two checks for exited processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Starts every case on all `devices`. In the started processes, calls `run` with the launch
/// environment, the name of the case and the number of ranks instead.
pub fn main(cases: &[Case], devices: usize, run: impl FnOnce(LaunchEnv, &str, usize)) -> ExitCode {
    if let Some(launched) = LaunchEnv::from_env().unwrap() {
        run(launched, &env::args().nth(1).unwrap(), launched.placement().world_size().as_usize());
    } else if devices == 0 {
        eprintln!("SKIPPED: no device found; nothing was checked");
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
        eprintln!("SKIPPED: {} needs {} devices, found {devices}", case.name, case.ranks);
        return;
    }
    launch(case, devices);
    if devices > 2 {
        launch(case, 2);
    }
}

/// Runs a case on `ranks` processes, and checks how they exit.
fn launch(case: &Case, ranks: usize) {
    let folder = tempfile::tempdir().unwrap();
    let log = |rank: usize| folder.path().join(format!("log-{rank}"));
    let mut children: Vec<Child> =
        (0..ranks).map(|rank| start(case.name, rank, ranks, folder.path(), &log(rank))).collect();
    let succeeded = wait(&mut children);
    let stderr: String = (0..ranks).map(|rank| fs::read_to_string(log(rank)).unwrap()).collect();
    match succeeded {
        Some(succeeded) => case.check(ranks, succeeded, &stderr),
        None => panic!("{} on {ranks} ranks did not exit within {LIMIT:?}: {stderr}", case.name),
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

/// Waits for all processes, and kills the rest if one fails. Returns true if all succeeded, or
/// `None` after the time limit.
fn wait(children: &mut [Child]) -> Option<bool> {
    let start = Instant::now();
    loop {
        let outcomes: Vec<Option<bool>> = children
            .iter_mut()
            .map(|child| child.try_wait().unwrap().map(|status| status.success()))
            .collect();
        if outcomes.iter().all(|outcome| *outcome == Some(true)) {
            return Some(true);
        }
        let failed = outcomes.contains(&Some(false));
        if failed || start.elapsed() > LIMIT {
            children.iter_mut().for_each(kill);
            return failed.then_some(false);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

fn kill(child: &mut Child) {
    // Fails if the process has exited, which is as good.
    drop(child.kill());
    child.wait().unwrap();
}
