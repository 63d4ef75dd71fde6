//! Random programs, gradients and faults over threads, compared with a reference to the bit.

use std::time::Duration;

use pmap_mesh::DeviceMesh;

use crate::{
    coverage::Coverage,
    differential::{
        bits::REDUCIBLE,
        cases::SeededCases,
        faults::{self, Scenario},
        generate,
        gradients::{self, Chain},
        grid::Grid,
        layout,
        program::Program,
        random::Random,
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

#[test]
fn programs_match_the_reference() {
    let programs: SeededCases<Program> =
        SeededCases::new("--test all programs", |random| generate::program(random, None));
    programs.run(3000, || {
        let mut meshes = MeshCache::new(over_threads);
        move |program| tested::check(program, meshes.open(&program.grid), &reference::run(program))
    });
}

#[test]
fn gradients_match_one_graph() {
    let chains: SeededCases<Chain> =
        SeededCases::new("--test all gradients", |random| gradients::chain(random, None));
    chains.run(3000, || {
        let mut meshes = MeshCache::new(over_threads);
        move |chain| gradients::check(chain, meshes.open(&chain.grid))
    });
}

#[test]
fn faults_end_with_a_possible_error() {
    let scenarios: SeededCases<Scenario> = SeededCases::new("--test all faults", faults::scenario);
    scenarios.run(2000, || {
        let mut patient = MeshCache::new(over_threads);
        let mut hasty = MeshCache::new(with_a_deadline);
        move |scenario| {
            let meshes = if scenario.deadline_passed() { &mut hasty } else { &mut patient };
            faults::check(scenario, meshes.open(scenario.grid()))
        }
    });
}

#[test]
fn random_programs_cover_every_kind() {
    let mut coverage = Coverage::default();
    for seed in 0..1000 {
        let program = generate::program(&mut Random::new(seed), None);
        coverage.note_program(&program, &reference::run(&program));
    }
    coverage.assert_ops(50);
    coverage.assert_each(50, REDUCIBLE.map(|dtype| dtype.as_str()));
    coverage.assert_each(20, ["f8e4m3", "empty", "large", "Sums"]);
    coverage.assert_each(
        50,
        layout::Layout::ALL.map(|layout| format!("{layout:?}")).iter().map(String::as_str),
    );
    coverage.assert_each(50, ["1 axes", "2 axes", "3 axes", "1 slots", "5 slots", "6 slots"]);
    coverage.assert_each(50, ["Call", "CallInto", "Resident", "Refuse", "Pad", "Balanced"]);
    coverage.assert_each(30, ["Shard", "Concat", "Stack", "Sum", "Mean"]);
    coverage.assert_each(3, ["Gather(0)", "NotReplicated(0)", "Specs([(0, MeanOfIntegers)])"]);
    coverage.assert_each(50, ["Blocking", "Start Sum", "Start Gather", "Start Reduce"]);
    coverage.assert_each(20, ["large Gather", "large Reduce"]);
    coverage.assert_each(20, ["Wait 1", "Wait 2", "Wait 3"]);
    let faults = [
        "Axes",
        "DuplicateAxis",
        "ReducedInput",
        "DimOutOfRange",
        "NotDivisible",
        "CutAfterUneven",
    ];
    coverage
        .assert_each(2, faults.map(|fault| format!("argument {fault}")).iter().map(String::as_str));
}

#[test]
fn random_chains_cover_every_kind() {
    let mut coverage = Coverage::default();
    for seed in 0..1000 {
        coverage.note_chain(&gradients::chain(&mut Random::new(seed), None));
    }
    coverage.assert_ops(50);
    coverage.assert_each(50, ["Product"]);
}

#[test]
fn random_scenarios_cover_every_end() {
    let mut coverage = Coverage::default();
    for seed in 0..1000 {
        coverage.note_scenario(&faults::scenario(&mut Random::new(seed)));
    }
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
    coverage.assert_each(20, ends);
    coverage.assert_each(10, ["Deadline", "Starts differ"]);
}
