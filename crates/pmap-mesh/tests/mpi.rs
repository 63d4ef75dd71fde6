//! One process per slot gives what one thread per slot gives, to the bit; and no process outlives
//! another's failure.
//!
//! The program starts itself under `mpirun`, once for each case; what runs there is one of several
//! ranks.

mod conformance;

use std::process::ExitCode;

use candle_core::Device;
use pmap_mesh::{DeviceMesh, DeviceMeshBuilder, Error, ProcessError, ValueError};
use process_tests::{Case, Engine, mpirun};

const CASES: [Case; 22] = [
    Case::succeeds("collectives", 2),
    Case::succeeds("collectives", 4),
    Case::succeeds("calls", 2),
    Case::succeeds("calls", 3),
    Case::succeeds("refusals", 2),
    Case::succeeds("replicated", 2),
    Case::succeeds("replicated", 4),
    Case::succeeds("lists", 3),
    Case::succeeds("repeated layout", 4),
    Case::succeeds("runs", 3),
    Case::fails("too many", 3, "2048 collectives are under way already"),
    Case::fails("started others", 2, "replica 1 calls start_psum of f32 [4]"),
    Case::fails("started and called", 2, "replica 1 calls psum of f32 [2000]"),
    Case::fails("not waited", 2, "replica 1 has returned without having waited for start_psum"),
    Case::fails("not started", 2, "replica 1 did not come"),
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
    mpirun::main(&CASES, |case, ranks| match case {
        "refusals" => refusals(),
        _ => conformance::run(&Mpi, case, ranks),
    })
}

/// What a mesh of processes cannot be, and cannot do.
fn refusals() {
    // MPI ends with its last mesh, and does not begin again.
    let mesh = Mpi.open(DeviceMesh::builder());
    let three = DeviceMesh::builder().axis("a", 3).mpi(Device::Cpu);
    assert!(
        matches!(three, Err(Error::Process(ProcessError::Mpi { reason })) if reason == "2 processes do not fill a mesh of 3 slots")
    );
    let sub_mesh = mesh.sub_mesh(DeviceMesh::AXIS, 0);
    assert!(matches!(
        sub_mesh,
        Err(Error::Process(ProcessError::Unsupported { what: "a sub-mesh" }))
    ));
    let lists = mesh.process_allgather(Vec::new());
    assert!(matches!(lists, Err(Error::Value(ValueError::ListCount { lists: 0, slots: 1 }))));
}
