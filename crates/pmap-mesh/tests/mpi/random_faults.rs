//! Faults over processes, which all end with an error on standard error.

use std::{ops::RangeInclusive, time::Duration};

use candle_core::Device;
use process_tests::mpirun;

use crate::differential::{
    cases::seeds,
    faults::{self, Scenario},
    random::Random,
};

/// How many seeds of faults, of which each second or so is one of few processes: each ends these, and
/// they take half a second to start.
const USUAL_FAULTS: u64 = 24;
/// What the case of a fault is called, before its seed.
const FAULT: &str = "fault ";
/// How many processes: with more, a small machine has little to do but to start them.
const RANKS: RangeInclusive<usize> = 2..=4;
/// How long a replica waits for one that does not come.
const DEADLINE: Duration = Duration::from_millis(500);

/// The seed in the name of a case, if it is a fault.
pub(crate) fn seed(case: &str) -> Option<u64> {
    case.strip_prefix(FAULT)?.parse().ok()
}

/// Faults, each in processes of its own.
pub(crate) fn run_all() {
    for seed in seeds(USUAL_FAULTS) {
        let Some(scenario) = scenario(seed) else { continue };
        let ranks = scenario.grid().slots();
        let (succeeded, stderr) = mpirun::outcome(&format!("{FAULT}{seed}"), ranks);
        if let Err(failure) = check(&scenario, succeeded, &stderr) {
            panic!("{failure}\nfault {seed} on {ranks} ranks: {scenario}");
        }
    }
}

/// The scenario of a seed, if it is one of few processes.
pub(crate) fn scenario(seed: u64) -> Option<Scenario> {
    let scenario = faults::scenario(&mut Random::new(seed));
    RANKS.contains(&scenario.grid().slots()).then_some(scenario)
}

/// Runs it as one of them.
pub(crate) fn run(scenario: &Scenario) {
    let mesh = scenario.grid().builder().deadline(DEADLINE).mpi(Device::Cpu).unwrap();
    faults::check(scenario, &mesh).unwrap();
}

/// How the processes have ended otherwise than they may.
fn check(scenario: &Scenario, succeeded: bool, stderr: &str) -> Result<(), String> {
    let ends = scenario.ends();
    let may_succeed = ends.iter().any(|end| end == "Ok");
    // Two threads at once may be found out, or have come one after the other.
    let may_fail = !may_succeed || scenario.to_string().contains("TwoThreads");
    let is_right = if succeeded {
        may_succeed
    } else {
        may_fail
            && !stderr.contains("panicked at")
            && ends.iter().flat_map(|end| texts(end)).any(|text| stderr.contains(text))
    };
    if is_right { Ok(()) } else { Err(format!("success: {succeeded}, for {ends:?}\n{stderr}")) }
}

/// What the processes may say of such a failure. Whoever waits for the one that has failed learns of
/// it from what that one calls, or from nothing.
fn texts(end: &str) -> [&'static str; 3] {
    let own = match end {
        "Failed" => "failed: ",
        "Panicked" => "panicked: ",
        "UnknownAxis" => "has no axis",
        "NeverAwaited" => "has returned without having waited",
        "Ok" | "Mismatch" | "PeerReturned" | "Deadlock" | "Deadline" => " calls ",
        other => panic!("no end is named {other}"),
    };
    [own, " calls ", "did not come"]
}
