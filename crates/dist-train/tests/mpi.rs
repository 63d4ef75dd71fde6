//! Training with one process per slot, compared bitwise with one thread per slot.
//!
//! The program starts itself under `mpirun` for each case; each process is one rank.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::cast_possible_truncation, reason = "sizes are small")]
#![allow(clippy::needless_pass_by_value, reason = "constructors take builders by value")]

mod conformance;
#[allow(dead_code, reason = "the tests over threads use more of it")]
mod random;

use std::process::ExitCode;

use candle_core::Device;
use pmap_mesh::{DeviceMesh, DeviceMeshBuilder};
use process_tests::{Case, Engine, mpirun};

const CASES: [Case; 11] = [
    Case::succeeds("training", 2),
    Case::succeeds("beginnings", 1),
    Case::succeeds("beginnings", 3),
    Case::succeeds("refusals", 3),
    Case::succeeds("losses", 3),
    Case::succeeds("batches", 3),
    Case::succeeds("random", 3),
    Case::succeeds("checkpoints", 2),
    Case::succeeds("pretrained", 3),
    Case::succeeds("fully-sharded", 3),
    Case::succeeds("fully-sharded-groups", 4),
];

struct MpiEngine;

impl Engine for MpiEngine {
    fn open(&self, builder: DeviceMeshBuilder) -> DeviceMesh {
        builder.mpi(self.device()).unwrap()
    }

    fn device(&self) -> Device {
        Device::Cpu
    }
}

fn main() -> ExitCode {
    mpirun::main(&CASES, |case, ranks| conformance::run(&MpiEngine, case, ranks))
}
