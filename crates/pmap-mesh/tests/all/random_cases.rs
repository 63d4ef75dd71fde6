//! Random programs, gradients and faults over threads, compared with a reference to the bit.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use pmap_mesh::DeviceMesh;

use crate::{
    coverage::Coverage,
    differential::{
        bits::REDUCIBLE,
        cases::{SeededCases, seeds},
        faults::{self, Scenario},
        generate,
        gradients::{self, Chain},
        grid::Grid,
        layout,
        program::Program,
        reference,
        tested::{self, MeshCache},
    },
};

fn over_threads(grid: &Grid) -> DeviceMesh {
    grid.builder().cpu().unwrap()
}

/// Opens a mesh with a deadline, for scenarios with a replica that arrives only after the end of
/// its call.
fn with_a_deadline(grid: &Grid) -> DeviceMesh {
    grid.builder().deadline(Duration::from_millis(10)).cpu().unwrap()
}

const USUAL_PROGRAMS: u64 = 600;
const USUAL_CHAINS: u64 = 1000;
const USUAL_SCENARIOS: u64 = 500;

/// Asserts that the usual cases cover every kind; a longer or shorter run may begin anywhere.
fn assert_covers(usual: u64, coverage: &Mutex<Coverage>, covers: fn(&Coverage)) {
    if seeds(usual) == (0..usual) {
        covers(&coverage.lock().unwrap());
    }
}

#[test]
fn programs_match_the_reference() {
    let programs: SeededCases<Program> =
        SeededCases::new("--test all programs", |random| generate::program(random, None));
    let coverage = Arc::new(Mutex::new(Coverage::default()));
    let noted = Arc::clone(&coverage);
    programs.run(USUAL_PROGRAMS, || {
        let mut meshes = MeshCache::new(over_threads);
        move |program| {
            let expected = reference::run(program);
            noted.lock().unwrap().note_program(program, &expected);
            tested::check(program, meshes.open(&program.grid), &expected)
        }
    });
    assert_covers(USUAL_PROGRAMS, &coverage, |coverage| {
        coverage.assert_ops(30);
        coverage.assert_each(30, REDUCIBLE.map(|dtype| dtype.as_str()));
        coverage.assert_each(10, ["f8e4m3", "empty", "large", "Sums"]);
        let layouts = layout::Layout::ALL.map(|layout| format!("{layout:?}"));
        coverage.assert_each(30, layouts.iter().map(String::as_str));
        coverage.assert_each(30, ["1 axes", "2 axes", "3 axes", "1 slots", "5 slots", "6 slots"]);
        coverage.assert_each(30, ["Call", "CallInto", "Resident", "Refuse", "Pad", "Balanced"]);
        coverage.assert_each(20, ["Shard", "Concat", "Stack"]);
        coverage.assert_each(1, ["Gather(0)", "NotReplicated(0)"]);
        coverage.assert_each(30, ["Blocking", "Start Gather", "Start Reduce"]);
        coverage.assert_each(10, ["large Gather", "large Reduce", "Wait 1", "Wait 2", "Wait 3"]);
        let faults = [
            "Axes",
            "DuplicateAxis",
            "ReducedInput",
            "DimOutOfRange",
            "NotDivisible",
            "CutAfterUneven",
        ]
        .map(|fault| format!("argument {fault}"));
        coverage.assert_each(1, faults.iter().map(String::as_str));
    });
}

#[test]
fn gradients_match_one_graph() {
    let chains: SeededCases<Chain> =
        SeededCases::new("--test all gradients", |random| gradients::chain(random, None));
    let coverage = Arc::new(Mutex::new(Coverage::default()));
    let noted = Arc::clone(&coverage);
    chains.run(USUAL_CHAINS, || {
        let mut meshes = MeshCache::new(over_threads);
        move |chain| {
            noted.lock().unwrap().note_chain(chain);
            gradients::check(chain, meshes.open(&chain.grid))
        }
    });
    assert_covers(USUAL_CHAINS, &coverage, |coverage| {
        coverage.assert_ops(50);
        coverage.assert_each(50, ["Product"]);
    });
}

#[test]
fn faults_end_with_a_possible_error() {
    let scenarios: SeededCases<Scenario> = SeededCases::new("--test all faults", faults::scenario);
    let coverage = Arc::new(Mutex::new(Coverage::default()));
    let noted = Arc::clone(&coverage);
    scenarios.run(USUAL_SCENARIOS, || {
        let mut patient = MeshCache::new(over_threads);
        let mut hasty = MeshCache::new(with_a_deadline);
        move |scenario| {
            noted.lock().unwrap().note_scenario(scenario);
            let meshes = if scenario.deadline_passed() { &mut hasty } else { &mut patient };
            faults::check(scenario, meshes.open(scenario.grid()))
        }
    });
    assert_covers(USUAL_SCENARIOS, &coverage, |coverage| {
        let ends = [
            "Ok",
            "Failed",
            "Panicked",
            "UnknownAxis",
            "Mismatch",
            "PeerReturned",
            "Deadlock",
            "NeverAwaited",
        ];
        coverage.assert_each(10, ends);
        coverage.assert_each(5, ["Deadline", "Starts differ"]);
    });
}
