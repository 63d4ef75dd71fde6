//! Random programs and gradients over MPI, with a process for each slot. All ranks generate the
//! same programs and compare the results of their own slot.

use candle_core::Device;
use pmap_mesh::DeviceMesh;

use crate::differential::{
    cases::SeededCases,
    generate,
    gradients::{self, Chain},
    grid::Grid,
    program::Program,
    reference,
    tested::{self, MeshCache},
};

/// The default number of cases: more processes than cores are slow.
const USUAL: u64 = 40;

pub(crate) fn programs(ranks: usize) {
    let programs: SeededCases<Program> =
        SeededCases::new("--features mpi --test mpi", move |random| {
            generate::program(random, Some(ranks))
        });
    programs.run(USUAL, move || {
        let mut meshes = meshes(ranks);
        move |program| tested::check(program, meshes.open(&program.grid), &reference::run(program))
    });
}

pub(crate) fn gradients(ranks: usize) {
    let chains: SeededCases<Chain> = SeededCases::new("--features mpi --test mpi", move |random| {
        gradients::chain(random, Some(ranks))
    });
    chains.run(USUAL, move || {
        let mut meshes = meshes(ranks);
        move |chain| gradients::check(chain, meshes.open(&chain.grid))
    });
}

/// Returns meshes over the processes, including a first one: MPI ends with the last mesh, and does
/// not start again.
fn meshes(ranks: usize) -> MeshCache {
    let mut meshes = MeshCache::new(over_mpi);
    let _first: &DeviceMesh = meshes.open(&Grid(vec![ranks]));
    meshes
}

fn over_mpi(grid: &Grid) -> DeviceMesh {
    grid.builder().mpi(Device::Cpu).unwrap()
}
