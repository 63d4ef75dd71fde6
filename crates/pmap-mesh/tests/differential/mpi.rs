//! The random programs and gradients of `main.rs` over MPI, a process for each slot.
//!
//! The program starts itself under `mpirun`; all ranks make the same programs and compare what their
//! own slot gets.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "the case of a panic is told before it goes on")]

mod array;
mod bits;
mod cases;
#[allow(dead_code, reason = "what is asked of faults over threads")]
mod faults;
mod generate;
mod gradients;
mod grid;
mod layout;
mod op;
mod processes;
mod program;
mod random;
mod reference;
mod spec;
mod tested;
mod underway;

use std::process::ExitCode;

use candle_core::Device;
use pmap_mesh::DeviceMesh;
use process_tests::{Case, mpirun};

use crate::{
    cases::{Cases, seeds},
    gradients::Chain,
    grid::Grid,
    program::Program,
    tested::Meshes,
};

const CASES: [Case; 5] = [
    Case::succeeds("programs", 2),
    Case::succeeds("programs", 3),
    Case::succeeds("programs", 4),
    Case::succeeds("gradients", 2),
    Case::succeeds("gradients", 4),
];

/// How many cases, unless it is told: more processes than cores are slow.
const USUAL: u64 = 100;
/// How many seeds of faults, of which each second or so is one of few processes: each ends these, and
/// they take half a second to start.
const USUAL_FAULTS: u64 = 24;
/// What the case of a fault is called, before its seed.
const FAULT: &str = "fault ";

fn main() -> ExitCode {
    let run = |case: &str, ranks| match case.strip_prefix(FAULT) {
        Some(seed) => processes::run(&processes::scenario(seed.parse().unwrap()).unwrap()),
        None if case == "programs" => programs(ranks),
        None => gradients(ranks),
    };
    mpirun::main_and_then(&CASES, run, faults)
}

/// Faults, each in processes of its own.
fn faults() {
    for seed in seeds(USUAL_FAULTS) {
        let Some(scenario) = processes::scenario(seed) else { continue };
        let ranks = scenario.grid().slots();
        let (succeeded, stderr) = mpirun::outcome(&format!("{FAULT}{seed}"), ranks);
        if let Err(failure) = processes::check(&scenario, succeeded, &stderr) {
            panic!("{failure}\nfault {seed} on {ranks} ranks: {scenario}");
        }
    }
}

fn programs(ranks: usize) {
    let programs: Cases<Program> =
        Cases::new("--features mpi --test differential_mpi", move |random| {
            generate::program(random, Some(ranks))
        });
    programs.run(USUAL, move || {
        let mut meshes = meshes(ranks);
        move |program| tested::check(program, meshes.of(&program.grid), &reference::run(program))
    });
}

fn gradients(ranks: usize) {
    let chains: Cases<Chain> =
        Cases::new("--features mpi --test differential_mpi", move |random| {
            gradients::chain(random, Some(ranks))
        });
    chains.run(USUAL, move || {
        let mut meshes = meshes(ranks);
        move |chain| gradients::check(chain, meshes.of(&chain.grid))
    });
}

/// Meshes over the processes, with a first one: MPI ends with the last, and does not begin again.
fn meshes(ranks: usize) -> Meshes {
    let mut meshes = Meshes::new(over_mpi);
    let _first: &DeviceMesh = meshes.of(&Grid(vec![ranks]));
    meshes
}

fn over_mpi(grid: &Grid) -> DeviceMesh {
    grid.builder().mpi(Device::Cpu).unwrap()
}
