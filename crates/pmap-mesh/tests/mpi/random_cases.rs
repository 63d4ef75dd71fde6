//! Random programs and gradients over MPI, a process for each slot: all ranks make the same programs
//! and compare the results of their own slot.

use candle_core::Device;
use pmap_mesh::DeviceMesh;

use crate::differential::{
    cases::Cases,
    generate,
    gradients::{self, Chain},
    grid::Grid,
    program::Program,
    reference,
    tested::{self, Meshes},
};

/// How many cases, unless it is told: more processes than cores are slow.
const USUAL: u64 = 100;

pub(crate) fn programs(ranks: usize) {
    let programs: Cases<Program> = Cases::new("--features mpi --test mpi", move |random| {
        generate::program(random, Some(ranks))
    });
    programs.run(USUAL, move || {
        let mut meshes = meshes(ranks);
        move |program| tested::check(program, meshes.of(&program.grid), &reference::run(program))
    });
}

pub(crate) fn gradients(ranks: usize) {
    let chains: Cases<Chain> = Cases::new("--features mpi --test mpi", move |random| {
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
