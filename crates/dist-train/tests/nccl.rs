//! Training with one process per GPU, compared bitwise with one thread per slot.
//!
//! The program starts itself for each GPU like a launcher: it passes each process its rank, and
//! stops all processes when one fails. With one GPU, the world has one rank and sends nothing.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::cast_possible_truncation, reason = "sizes are small")]
#![allow(clippy::needless_pass_by_value, reason = "constructors take builders by value")]

mod conformance;
#[allow(dead_code, reason = "the tests over threads use more of it")]
mod random;

use std::{cell::Cell, process::ExitCode};

use candle_core::{Device, cuda_backend::cudarc::driver::CudaContext};
use core_types::LaunchEnv;
use pmap_mesh::{DeviceMesh, DeviceMeshBuilder};
use process_tests::{Case, Engine, ranks};

const CASES: [Case; 6] = [
    Case::succeeds("training", 1),
    Case::succeeds("beginnings", 1),
    Case::succeeds("refusals", 1),
    Case::succeeds("losses", 1),
    Case::succeeds("checkpoints", 1),
    Case::succeeds("fully-sharded", 1),
];

/// The engine of one process.
struct NcclEngine {
    launched: LaunchEnv,
    n_meshes: Cell<usize>,
}

impl NcclEngine {
    fn local_rank(&self) -> usize {
        self.launched.local_rank().unwrap().as_usize()
    }
}

impl Engine for NcclEngine {
    fn open(&self, builder: DeviceMeshBuilder) -> DeviceMesh {
        // All processes create their meshes in the same order.
        let nth = self.n_meshes.replace(self.n_meshes.get() + 1);
        let store = process_tests::folder().join(format!("id-{nth}"));
        builder.nccl(self.launched.placement(), self.local_rank(), store).unwrap()
    }

    fn device(&self) -> Device {
        Device::new_cuda_with_stream(self.local_rank()).unwrap()
    }
}

fn main() -> ExitCode {
    let devices = Device::new_cuda(0).map_or(0, |_| CudaContext::device_count().unwrap());
    ranks::main(&CASES, usize::try_from(devices).unwrap(), |launched, case, ranks| {
        let engine = NcclEngine { launched, n_meshes: Cell::new(0) };
        conformance::run(&engine, case, ranks);
    })
}
