//! One process per slot gives what one thread per slot gives, to the bit; and no process outlives
//! another's failure.
//!
//! The program starts itself under `mpirun`, once for each case; what runs there is one of several
//! ranks.

mod conformance;

use std::process::ExitCode;

use candle_core::Device;
use pmap_mesh::{DeviceMesh, DeviceMeshBuilder};
use process_tests::{Case, Engine, mpirun};

const CASES: [Case; 11] = [
    Case::succeeds("collectives", 2),
    Case::succeeds("collectives", 4),
    Case::succeeds("calls", 2),
    Case::succeeds("calls", 3),
    Case::fails("failure", 2, "rank 1: replica 1 on Cpu failed: no more data"),
    Case::fails("panic", 2, "this one breaks"),
    Case::fails("deadline", 2, "replica 1 did not come"),
    Case::fails("crosswise", 4, "did not come"),
    Case::fails("mismatch", 2, "replica 1 calls pmax of f32 [70000]"),
    Case::fails("deserted", 2, "replica 1 calls the end of the function"),
    Case::fails("killed", 3, ""),
];

struct Mpi;

impl Engine for Mpi {
    #[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    fn open(&self, builder: DeviceMeshBuilder) -> DeviceMesh {
        builder.mpi(self.device()).unwrap()
    }

    fn device(&self) -> Device {
        Device::Cpu
    }
}

fn main() -> ExitCode {
    mpirun::main(&CASES, |case, ranks| conformance::run(&Mpi, case, ranks))
}
