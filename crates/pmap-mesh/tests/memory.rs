//! The peak memory of collectives, counted by a global allocator. This is a separate program, and
//! its tests run one at a time, so that nothing else is counted.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Tensor};
use peak_alloc::PeakAlloc;
use pmap_mesh::{
    ALL, DeviceMesh, Replica,
    support::{Run, RunLayout},
};
use process_tests::nothing;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// The lock of the counter, which counts all threads of the test program.
static COUNTING: Mutex<()> = Mutex::new(());

const ITEMS: usize = 4 << 20;
const BYTES: usize = 4 * ITEMS;
const SLOTS: usize = 4;

/// Locks the counter; a test keeps the lock from its first allocation to its last.
fn counting() -> MutexGuard<'static, ()> {
    COUNTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the peak of the additional memory during `f`, in units of `BYTES`.
fn peak_copies(f: impl Fn(&Replica) -> Result<()> + Send + Sync + 'static) -> f64 {
    let mesh = DeviceMesh::builder().axis("a", SLOTS).pin(false).cpu().unwrap();
    let run = mesh.pmap(move |ctx, _: Tensor| f(ctx)).in_axes(None);
    let base = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    run.call(nothing()).unwrap();
    (MEMORY.peak_usage() - base) as f64 / BYTES as f64
}

fn large() -> Tensor {
    Tensor::ones(ITEMS, DType::F32, &Device::Cpu).unwrap()
}

/// Returns a view that takes no memory.
fn none() -> Tensor {
    Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap().broadcast_as(ITEMS).unwrap()
}

#[test]
fn broadcast_receivers_share_one_copy() {
    let _counting = counting();
    let x = large();
    let peak = peak_copies(move |ctx| {
        let sent = if ctx.slot() == 1 { x.clone() } else { none() };
        let received = ctx.broadcast(&sent, 1, ALL)?;
        // Sum them, as a model that uses the result would.
        ctx.barrier(ALL)?;
        assert_eq!(received.dims(), [ITEMS]);
        Ok(())
    });
    assert!((0.9..1.2).contains(&peak), "{peak} copies");
}

#[test]
fn permute_copies_only_on_senders() {
    let _counting = counting();
    let x = large();
    let peak = peak_copies(move |ctx| {
        let sent = if ctx.slot() == 0 { x.clone() } else { none() };
        let received = ctx.ppermute(&sent, &[(0, 3)], ALL)?;
        ctx.barrier(ALL)?;
        drop(received);
        Ok(())
    });
    // The slots without a sender allocate zeros.
    assert!((3.9..4.2).contains(&peak), "{peak} copies");
}

#[test]
fn reduce_scatter_allocates_only_parts() {
    let _counting = counting();
    let x = large();
    let peak = peak_copies(move |ctx| {
        let part = ctx.psum_scatter(&x, 0, ALL)?;
        ctx.barrier(ALL)?;
        assert_eq!(part.dims(), [ITEMS / SLOTS]);
        Ok(())
    });
    assert!((0.9..1.2).contains(&peak), "{peak} copies");
}

#[test]
fn gathered_runs_are_stored_once() {
    let _counting = counting();
    let x = large();
    let runs = (0..SLOTS).map(|slot| {
        vec![Run { tensor: 0, items: slot * ITEMS / SLOTS..(slot + 1) * ITEMS / SLOTS }]
    });
    let layout = RunLayout::new("layer", [(ITEMS, DType::F32)], runs).unwrap();
    let peak = peak_copies(move |ctx| {
        let own = x.narrow(0, ctx.slot() * ITEMS / SLOTS, ITEMS / SLOTS)?;
        let whole = ctx.gather_runs(vec![own], &layout, ALL)?;
        ctx.barrier(ALL)?;
        let sums = ctx.reduce_runs(vec![whole[0].as_detached_tensor()], &layout, ALL)?;
        drop(whole);
        ctx.barrier(ALL)?;
        assert_eq!(sums[0].dims(), [ITEMS / SLOTS]);
        Ok(())
    });
    // The full tensors, and then the sums of all parts.
    assert!((1.9..2.2).contains(&peak), "{peak} copies");
}
