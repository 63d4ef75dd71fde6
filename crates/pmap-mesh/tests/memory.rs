//! The peak memory of collectives, counted by a global allocator: a program of its own, whose tests
//! run one at a time, so that nothing else counts.

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

/// Guards the counter, which counts for all threads of the test program.
static COUNTING: Mutex<()> = Mutex::new(());

const ITEMS: usize = 4 << 20;
const BYTES: usize = 4 * ITEMS;
const SLOTS: usize = 4;

/// Held by a test from its first allocation to its last.
fn counting() -> MutexGuard<'static, ()> {
    COUNTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The most that `f` holds beyond what is there when it begins, in copies of `BYTES`.
fn peak_copies(f: impl Fn(&Replica) -> Result<()> + Send + Sync + 'static) -> f64 {
    let mesh = DeviceMesh::builder().axis("a", SLOTS).pin(false).cpu().unwrap();
    let run = mesh.pmap(move |ctx, _: Tensor| f(ctx)).in_axes(None);
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    run.call(nothing()).unwrap();
    (MEMORY.peak_usage() - before) as f64 / BYTES as f64
}

fn large() -> Tensor {
    Tensor::ones(ITEMS, DType::F32, &Device::Cpu).unwrap()
}

/// A view that takes no memory.
fn none() -> Tensor {
    Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap().broadcast_as(ITEMS).unwrap()
}

#[test]
fn all_who_receive_a_broadcast_share_one_copy() {
    let _counting = counting();
    let x = large();
    let peak = peak_copies(move |ctx| {
        let sent = if ctx.slot() == 1 { x.clone() } else { none() };
        let received = ctx.broadcast(&sent, 1, ALL)?;
        // Together, as in a model that uses it.
        ctx.barrier(ALL)?;
        assert_eq!(received.dims(), [ITEMS]);
        Ok(())
    });
    assert!((0.9..1.2).contains(&peak), "{peak} copies");
}

#[test]
fn who_sends_nothing_along_a_permutation_copies_nothing() {
    let _counting = counting();
    let x = large();
    let peak = peak_copies(move |ctx| {
        let sent = if ctx.slot() == 0 { x.clone() } else { none() };
        let received = ctx.ppermute(&sent, &[(0, 3)], ALL)?;
        ctx.barrier(ALL)?;
        drop(received);
        Ok(())
    });
    // The slots that receive nothing make their zeros.
    assert!((3.9..4.2).contains(&peak), "{peak} copies");
}

#[test]
fn each_replica_gets_its_part_of_a_sum_alone() {
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
fn what_is_gathered_of_runs_is_there_once() {
    let _counting = counting();
    let x = large();
    let run =
        |slot: usize| Run { tensor: 0, items: slot * ITEMS / SLOTS..(slot + 1) * ITEMS / SLOTS };
    let layout =
        RunLayout::new("layer", [(ITEMS, DType::F32)], (0..SLOTS).map(|slot| vec![run(slot)]))
            .unwrap();
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
    // The whole, and then the sums of all parts.
    assert!((1.9..2.2).contains(&peak), "{peak} copies");
}
