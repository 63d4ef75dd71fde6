//! Exact counts of the slots' contributions to collectives.

use candle_core::{DType, Device, Result, Tensor, Var};
use pmap_mesh::{
    ALL, DeviceMesh, Replica,
    support::{Tally, Traffic},
};
use process_tests::{
    lists::{self, start_sum},
    nothing,
};

/// Returns the traffic of each slot of a 2 x 1 grid in `f`.
fn traffic(f: impl Fn(&Replica) -> Result<()> + Send + Sync + 'static) -> Vec<Traffic> {
    let mesh = DeviceMesh::builder().axis("a", 2).axis("b", 1).pin(false).cpu().unwrap();
    mesh.pmap(move |ctx, _: Tensor| f(ctx)).in_axes(None).call(nothing()).unwrap();
    mesh.traffic()
}

fn tally(calls: u64, bytes: u64) -> Tally {
    Tally { calls, bytes }
}

#[test]
fn every_kind_counts_contributed_bytes() {
    let of_slots = traffic(|ctx| {
        let x = Tensor::zeros((4, 2), DType::F32, &Device::Cpu)?;
        ctx.psum(&x, ALL)?;
        ctx.pmean(&x, "a")?;
        ctx.psum_list("list", &[x.clone(), x.to_dtype(DType::F64)?], ALL)?;
        ctx.all_gather(&x.narrow(0, 0, ctx.slot())?, 0, ALL)?;
        ctx.psum_scatter(&x, 0, ALL)?;
        ctx.all_to_all(&x, 0, 1, ALL)?;
        ctx.ppermute(&x, &[(1, 0)], ALL)?;
        ctx.broadcast(&x, 0, ALL)?;
        ctx.barrier(ALL)?;
        ctx.barrier(ALL)
    });
    for (slot, traffic) in of_slots.into_iter().enumerate() {
        let only_of = |sender| if slot == sender { 32 } else { 0 };
        let expected = Traffic {
            all_reduce: tally(3, 32 + 32 + 96),
            all_gather: tally(1, 8 * slot as u64),
            reduce_scatter: tally(1, 32),
            all_to_all: tally(1, 32),
            ppermute: tally(1, only_of(1)),
            broadcast: tally(1, only_of(0)),
            barrier: tally(2, 0),
            ..Traffic::default()
        };
        assert_eq!(traffic, expected, "slot {slot}");
    }
}

#[test]
fn backward_counts_its_collective() {
    let of_slots = traffic(|ctx| {
        let w = Var::zeros((2, 2), DType::F32, &Device::Cpu)?;
        ctx.all_gather(&w, 0, ALL)?.sum_all()?.backward()?;
        ctx.broadcast(&w, 1, ALL)?.sum_all()?.backward()?;
        ctx.pvary(&w, ALL)?.sum_all()?.backward().map(drop)
    });
    for (slot, traffic) in of_slots.into_iter().enumerate() {
        let expected = Traffic {
            all_gather: tally(1, 16),
            reduce_scatter: tally(1, 32),
            broadcast: tally(1, if slot == 1 { 16 } else { 0 }),
            reduce: tally(1, 16),
            all_reduce: tally(1, 16),
            ..Traffic::default()
        };
        assert_eq!(traffic, expected, "slot {slot}");
    }
}

#[test]
fn lists_count_the_slot_s_runs() {
    let layout = lists::layout(&[(vec![10], DType::F32), (vec![6], DType::BF16)], 2, 3);
    let own_bytes = |slot: usize| -> u64 {
        let runs = layout.runs(slot).iter();
        runs.map(|run| run.items.len() as u64 * [4, 2][run.tensor]).sum()
    };
    let expected = [own_bytes(0), own_bytes(1)];
    assert_eq!(expected[0] + expected[1], 52);
    let of_slots = traffic(move |ctx| {
        let zeros = |n: usize, dtype| Tensor::zeros(n, dtype, &Device::Cpu);
        let wholes = [zeros(10, DType::F32)?, zeros(6, DType::BF16)?];
        ctx.gather_runs(lists::owned_runs(&layout, ctx.slot(), &wholes)?, &layout, ALL)?;
        ctx.start_reduce_runs(wholes.to_vec(), &layout, ALL)?.wait().map(drop)
    });
    for (traffic, own_bytes) in of_slots.into_iter().zip(expected) {
        let all_gather = tally(1, own_bytes);
        let reduce_scatter = tally(1, 52);
        assert_eq!(traffic, Traffic { all_gather, reduce_scatter, ..Traffic::default() });
    }
}

#[test]
fn group_of_one_counts_nothing() {
    let of_slots = traffic(|ctx| {
        let x = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
        ctx.psum(&x, "b")?;
        ctx.all_gather(&x, 0, "b")?;
        start_sum(ctx, &x, "b")?.wait()?;
        ctx.barrier("b")
    });
    assert_eq!(of_slots, [Traffic::default(); 2]);
}
