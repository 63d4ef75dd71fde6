//! One process per GPU equals one thread per slot, to the bit, and no process outlives another's
//! failure.
//!
//! The program starts itself once for each GPU, like a launcher: it passes each process its rank,
//! and ends the others when one has failed. With one GPU that is a world of one, which sends
//! nothing. It has no test harness.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod conformance;

use std::{cell::Cell, process::ExitCode};

use candle_core::{DType, Device, Tensor, Var, cuda_backend::cudarc::driver::CudaContext};
use core_types::LaunchEnv;
use pmap_mesh::{ALL, DeviceMesh, DeviceMeshBuilder};
use process_tests::{Case, Engine, lists, ranks};

const CASES: &[Case] = &[
    Case::succeeds("collectives", 1),
    Case::succeeds("calls", 1),
    Case::succeeds("replicated", 2),
    Case::succeeds("trees", 2),
    Case::succeeds("underway", 1),
    Case::succeeds("runs", 2),
    Case::succeeds("set afterwards", 1),
    Case::fails("one gpu", 2, "take the same GPU, but NCCL needs one for each process"),
    Case::fails("started others", 2, "replica 1 calls start_reduce_runs(sum, layout "),
    Case::fails("not waited", 2, "without having waited for start_reduce_runs"),
    Case::fails("not started", 2, "replica 0 waited for more than 500ms in start_reduce_runs"),
    Case::fails("integers of 32 bits", 2, "tensors of type i32 cannot be sent over NCCL"),
    Case::fails("host tensor", 1, "NCCL needs it on the device of its replica"),
    Case::fails("failure", 2, "failed: no more data"),
    Case::fails("panic", 2, "this one breaks"),
    Case::fails(
        "deadline",
        2,
        "rank 0: replica 0 waited for more than 500ms in barrier over all axes",
    ),
    Case::fails("mismatch", 2, "replica 1 calls pmax of f32 [70000]"),
    Case::fails("deserted", 2, "replica 1 calls the end of the function"),
    Case::fails("killed", 2, ""),
];

/// One process of a case.
struct Nccl {
    launched: LaunchEnv,
    n_meshes: Cell<usize>,
}

impl Nccl {
    fn local_rank(&self) -> usize {
        self.launched.local_rank().unwrap().as_usize()
    }
}

impl Engine for Nccl {
    fn open(&self, builder: DeviceMeshBuilder) -> DeviceMesh {
        // All processes build their meshes in the same order.
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
    ranks::main(CASES, usize::try_from(devices).unwrap(), |launched, case, ranks| {
        let engine = Nccl { launched, n_meshes: Cell::new(0) };
        match case {
            "host tensor" => host_tensor(&engine),
            "one gpu" => one_gpu(&engine),
            "set afterwards" => set_afterwards(&engine),
            "integers of 32 bits" => integers_of_32_bits(&engine),
            _ => conformance::run(&engine, case, ranks),
        }
    })
}

/// Passes a tensor on the processor to a collective, which ends the program.
fn host_tensor(engine: &Nccl) {
    let mesh = engine.open(DeviceMesh::builder());
    let run = mesh.pmap(|ctx, x: Tensor| {
        ctx.barrier(ALL)?;
        ctx.all_gather(&x.to_device(&Device::Cpu)?, 0, ALL)
    });
    drop(run.in_axes(None).call(process_tests::nothing()));
}

/// Starts all processes on one GPU, which all of them reject before NCCL starts.
fn one_gpu(engine: &Nccl) {
    let store = process_tests::folder().join("id");
    let outcome = DeviceMesh::builder().nccl(engine.launched.placement(), 0, store);
    panic!("{}", outcome.unwrap_err());
}

/// Passes a dtype that NCCL supports and candle's kernels do not.
fn integers_of_32_bits(engine: &Nccl) {
    let mesh = engine.open(DeviceMesh::builder());
    let run = mesh.pmap(|ctx, _: Tensor| {
        let x = Tensor::zeros(3, DType::I32, ctx.device())?;
        lists::start_sum(ctx, &x, ALL)?.wait()?;
        ctx.psum(&x, ALL)
    });
    drop(run.in_axes(None).call(process_tests::nothing()));
}

/// Sets a variable right after sending it: a sender waits for no receiver.
fn set_afterwards(engine: &Nccl) {
    const ITEMS: usize = 1 << 18;
    let mesh = engine.open(DeviceMesh::builder());
    let run = mesh.pmap(|ctx, x: Tensor| {
        let var = Var::zeros(ITEMS, DType::F32, ctx.device())?;
        let mut all = Vec::new();
        for round in 0..20 {
            let value = (10 * round + ctx.slot()) as f32;
            var.set(&Tensor::full(value, ITEMS, ctx.device())?)?;
            let first = ctx.broadcast(var.as_tensor(), 0, ALL)?;
            var.affine(2.0, 0.0)?;
            all.push(first);
        }
        for (round, first) in all.iter().enumerate() {
            assert_eq!(first.to_vec1::<f32>()?, vec![10. * round as f32; ITEMS]);
        }
        Ok(x)
    });
    run.in_axes(None).call(process_tests::nothing()).unwrap();
}
