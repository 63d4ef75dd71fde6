//! One process per slot equals one thread per slot, to the bit, and no process outlives another's
//! failure.
//!
//! The program starts itself under `mpirun`, once for each case, with several ranks. It has no test
//! harness.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "../conformance/mod.rs"]
mod conformance;
#[path = "../differential/mod.rs"]
mod differential;
mod random_cases;
mod random_faults;

use std::{process::ExitCode, thread, time::Duration};

use candle_core::{DType, Device, Result, Tensor};
use core_types::LaunchEnv;
use peak_alloc::PeakAlloc;
use pmap_mesh::{
    ALL, DeviceMesh, DeviceMeshBuilder, Error, P, ProcessError, Replica,
    support::{Run, RunLayout},
};
use process_tests::{Case, Engine, mpirun, nothing};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// The deadline for a process that never arrives.
const DEADLINE: Duration = Duration::from_millis(500);

const CASES: &[Case] = &[
    Case::succeeds("collectives", 2),
    Case::succeeds("collectives", 4),
    Case::succeeds("calls", 2),
    Case::succeeds("calls", 3),
    Case::succeeds("refusals", 2),
    Case::succeeds("two threads", 2),
    Case::succeeds("memory", 3),
    Case::fails("never started", 2, "not all processes have started a mesh"),
    Case::fails(
        "left",
        2,
        "the process of replica 1 has left while replica 0 waits for it in barrier",
    ),
    Case::fails("swallowed", 2, "replica 1 calls psum of f32 [4]"),
    Case::succeeds("unsendable", 3),
    Case::succeeds("two purposes", 2),
    Case::succeeds("replicated", 2),
    Case::succeeds("replicated", 4),
    Case::succeeds("trees", 3),
    Case::succeeds("runs", 3),
    Case::fails("too many", 3, "2048 collectives are in flight already"),
    Case::fails("started others", 2, "replica 1 calls start_reduce_runs(sum, layout "),
    Case::fails("started and called", 2, "replica 1 calls psum of f32 [2000]"),
    Case::fails(
        "not waited",
        2,
        "replica 1 has returned without having waited for start_reduce_runs",
    ),
    Case::fails("not started", 2, "replica 1 did not arrive"),
    Case::fails("failure", 2, "rank 1: replica 1 on Cpu failed: no more data"),
    Case::fails("panic", 2, "this one breaks"),
    Case::fails("deadline", 2, "replica 1 did not arrive"),
    Case::fails("crosswise", 4, "did not arrive"),
    Case::fails("mismatch", 2, "replica 1 calls pmax of f32 [70000]"),
    Case::fails("deserted", 2, "replica 1 calls the end of the function"),
    Case::fails("killed", 3, ""),
    Case::succeeds("programs", 2),
    Case::succeeds("programs", 3),
    Case::succeeds("programs", 4),
    Case::succeeds("gradients", 2),
    Case::succeeds("gradients", 4),
];

struct Mpi;

impl Engine for Mpi {
    fn open(&self, builder: DeviceMeshBuilder) -> DeviceMesh {
        builder.mpi(self.device()).unwrap()
    }

    fn device(&self) -> Device {
        Device::Cpu
    }
}

fn main() -> ExitCode {
    let run = |case: &str, ranks| match case {
        "refusals" => refusals(),
        "two threads" => two_threads(),
        "memory" => memory(),
        "never started" => never_started(),
        "left" => left(),
        "swallowed" => swallowed(),
        "unsendable" => unsendable(),
        "two purposes" => two_purposes(),
        "programs" => random_cases::programs(ranks),
        "gradients" => random_cases::gradients(ranks),
        _ => match random_faults::seed(case) {
            Some(seed) => random_faults::run(&random_faults::scenario(seed).unwrap()),
            None => conformance::run(&Mpi, case, ranks),
        },
    };
    mpirun::main_and_then(CASES, run, random_faults::run_all)
}

/// Checks the errors of meshes that processes cannot build, and of calls that they cannot make.
fn refusals() {
    // MPI ends with its last mesh, and does not begin again.
    let mesh = Mpi.open(DeviceMesh::builder());
    let three = DeviceMesh::builder().axis("a", 3).mpi(Device::Cpu);
    assert!(
        matches!(three, Err(Error::Process(ProcessError::Mpi { reason })) if reason.starts_with("MPI has 2 processes, but the mesh has 3 slots"))
    );
    let lists = mesh.process_allgather(Vec::new());
    let refused = lists.unwrap_err().to_string();
    assert!(refused.ends_with("got 0 lists for the 1 slots of this process"), "{refused}");
}

/// Checks that a second thread cannot call on any mesh, nor build one.
fn two_threads() {
    let refused = |error: &Error| matches!(error, Error::Process(ProcessError::WrongThread { name }) if name == "two");
    let (first, second) = (Mpi.open(DeviceMesh::builder()), Mpi.open(DeviceMesh::builder()));
    let sum = |mesh: &DeviceMesh| {
        let run = mesh.pmap(|ctx, x: Tensor| ctx.psum(&x, ALL));
        run.in_axes(None).call_sharded(nothing()).map(drop)
    };
    sum(&first).unwrap();
    thread::scope(|scope| {
        let second = thread::Builder::new().name("two".into()).spawn_scoped(scope, move || {
            assert!(refused(&sum(&second).unwrap_err()));
            assert!(refused(&DeviceMesh::builder().mpi(Device::Cpu).unwrap_err()));
            // Runs while the first thread is in MPI.
            drop(second);
        });
        for _ in 0..100 {
            sum(&first).unwrap();
        }
        second.unwrap().join().unwrap();
    });
    sum(&Mpi.open(DeviceMesh::builder())).unwrap();
}

/// Checks the memory of collectives in flight: the results, plus the chunks in transfer.
fn memory() {
    const ITEMS: usize = 12 << 20;
    let mesh = Mpi.open(DeviceMesh::builder());
    let ranks = mesh.len();
    let run = move |rank: usize| Run {
        tensor: 0,
        items: rank * ITEMS / ranks..(rank + 1) * ITEMS / ranks,
    };
    let layout =
        RunLayout::new("layer", [(ITEMS, DType::F32)], (0..ranks).map(|rank| vec![run(rank)]));
    let layout = layout.unwrap();
    let peak = |f: &dyn Fn(&Replica, &Tensor) -> Result<()>, ctx: &Replica, x: &Tensor| {
        ctx.barrier(ALL)?;
        let base = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        f(ctx, x)?;
        Ok::<_, candle_core::Error>((MEMORY.peak_usage() - base) as f64 / (4 * ITEMS) as f64)
    };
    let measured = mesh.pmap(move |ctx, _: Tensor| {
        let x = Tensor::ones(ITEMS, DType::F32, ctx.device())?;
        let own = run(ctx.slot()).items;
        let own = x.narrow(0, own.start, own.len())?;
        let gather = |ctx: &Replica, _: &Tensor| {
            ctx.start_gather_runs(vec![own.clone()], &layout, ALL)?.wait().map(drop)
        };
        let reduce = |ctx: &Replica, x: &Tensor| {
            ctx.start_reduce_runs(vec![x.clone()], &layout, ALL)?.wait().map(drop)
        };
        // The full tensors; a third of them. Chunks in transfer are a sixth.
        let gathered = peak(&gather, ctx, &x)?;
        assert!((1.0..1.3).contains(&gathered), "{gathered} copies are gathered");
        let reduced = peak(&reduce, ctx, &x)?;
        assert!((0.33..0.6).contains(&reduced), "{reduced} copies are reduced");
        Ok(())
    });
    measured.in_axes(None).call(nothing()).unwrap();
}

/// Ends one process before it builds a mesh.
fn never_started() {
    let rank = LaunchEnv::from_env().unwrap().unwrap().placement().rank().as_u64();
    if rank == 0 {
        Mpi.open(DeviceMesh::builder().deadline(DEADLINE));
    }
}

/// Drops the mesh of one process while the other one calls.
fn left() {
    let mesh = Mpi.open(DeviceMesh::builder());
    if mesh.is_first_process() {
        let run = mesh.pmap(|ctx, _: Tensor| ctx.barrier(ALL));
        drop(run.in_axes(None).call(nothing()));
    }
}

/// Returns results that one process cannot send or hash, which fails the call on all processes.
fn unsendable() {
    let mesh = Mpi.open(DeviceMesh::builder());
    let has_failed = |failed: Error| match mesh.local_slots().start {
        1 => !matches!(failed, Error::Process(ProcessError::Peer { .. })),
        _ => matches!(failed, Error::Process(ProcessError::Peer { slot: 1, .. })),
    };
    // candle can store these numbers, but not compute with them.
    let numbers = |slot: usize| match slot {
        1 => Tensor::from_raw_buffer(&[1, 2], DType::F4, &[2], &Device::Cpu),
        _ => Tensor::zeros(2, DType::F32, &Device::Cpu),
    };
    for out_axes in [P::replicate(), P::shard(0, ALL)] {
        let run = mesh.pmap(move |ctx, _: Tensor| numbers(ctx.slot()));
        let failed = run.in_axes(None).out_axes(out_axes).call(nothing()).unwrap_err();
        assert!(has_failed(failed));
    }
    let own = numbers(mesh.local_slots().start).unwrap();
    assert!(has_failed(mesh.process_allgather(vec![vec![own]]).unwrap_err()));

    let sum = mesh.pmap(|ctx, x: Tensor| ctx.psum(&x, ALL));
    sum.in_axes(None).out_axes(P::replicate()).call(nothing()).unwrap();
}

/// Joins the results of a call in one process while the other one calls `process_allgather`.
fn two_purposes() {
    let mesh = Mpi.open(DeviceMesh::builder());
    let sum = mesh.pmap(|ctx, x: Tensor| ctx.psum(&x, ALL)).in_axes(None);
    let refused = if mesh.is_first_process() {
        sum.call_sharded(nothing()).unwrap();
        mesh.process_allgather(vec![Vec::new()]).map(drop)
    } else {
        sum.call(nothing()).map(drop)
    };
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("replica 0 calls process_allgather"), "{text}");
    assert!(text.contains("replica 1 calls the results of the function"), "{text}");
    sum.call(nothing()).unwrap();
}

/// Ignores a mismatch in the replicas, which go on.
fn swallowed() {
    let run = Mpi.open(DeviceMesh::builder()).pmap(|ctx, _: Tensor| {
        let x = Tensor::ones(3 + ctx.slot(), DType::F32, ctx.device())?;
        assert!(ctx.psum(&x, ALL).is_err());
        ctx.barrier(ALL)
    });
    drop(run.in_axes(None).call(nothing()));
}
