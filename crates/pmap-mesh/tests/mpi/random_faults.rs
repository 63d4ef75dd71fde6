//! Faults over processes, which all end with an error on standard error.

use std::{ops::RangeInclusive, time::Duration};

use process_tests::mpirun;

use crate::{
    Mpi,
    differential::{
        cases::seeds,
        faults::{self, Scenario},
        random::Random,
    },
};

/// The number of fault seeds. About half of them need only a few processes. Each fault ends its
/// processes, and starting them takes half a second.
const USUAL_FAULTS: u64 = 12;
/// The prefix of a fault's case name, before its seed.
const FAULT: &str = "fault ";
/// The largest number of processes: more would only keep a small machine busy with starting them.
const RANKS: RangeInclusive<usize> = 2..=4;
/// The deadline for a replica that never arrives.
const DEADLINE: Duration = Duration::from_millis(500);

/// Returns the seed in the name of a case, if it is a fault.
pub(crate) fn seed(case: &str) -> Option<u64> {
    case.strip_prefix(FAULT)?.parse().ok()
}

/// Runs all faults, each in separate processes.
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

/// Returns the scenario of a seed, if it needs only a few processes.
pub(crate) fn scenario(seed: u64) -> Option<Scenario> {
    let scenario = faults::scenario(&mut Random::new(seed));
    RANKS.contains(&scenario.grid().slots()).then_some(scenario)
}

/// Runs the scenario as one of its processes.
pub(crate) fn run(scenario: &Scenario) {
    let mesh = process_tests::open_within(&Mpi, scenario.grid().builder(), DEADLINE);
    faults::check(scenario, &mesh).unwrap();
}

/// Returns an error if the processes ended in an unexpected way.
fn check(scenario: &Scenario, succeeded: bool, stderr: &str) -> Result<(), String> {
    let ends = scenario.ends();
    let may_succeed = ends.iter().any(|end| end == "Ok");
    // Two concurrent threads may be detected, or may have called one after the other.
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

/// Returns the messages that processes may print for such a failure. A process that waits for the
/// failed one reports the call of that one, or a missing replica. A replica that ignores the return
/// of its peers may return without having waited itself, and the launcher may end the peers before
/// they report the call.
fn texts(end: &str) -> [&'static str; 3] {
    let own = match end {
        "Failed" => "failed: ",
        "Panicked" => "panicked: ",
        "UnknownAxis" => "has no axis",
        "NeverAwaited" | "PeerReturned" => "has returned without having waited",
        "Ok" | "Mismatch" | "Deadlock" | "Deadline" => " calls ",
        other => panic!("no end is named {other}"),
    };
    [own, " calls ", "did not arrive"]
}
