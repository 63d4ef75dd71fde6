//! Checks collectives on lists of tensors, with runs owned by each rank, for every engine.

#![allow(clippy::cast_possible_truncation, reason = "draws are below a small limit")]

use candle_core::{DType, Device, Result, Tensor, Var};
use core_types::Seed;
use pmap_mesh::{
    MeshAxes, Replica,
    support::{Pending, Run, RunLayout},
};

use crate::assert_same;

/// Returns a layout of these tensors over `ranks`, with cuts that depend on the seed. Some ranks
/// own several runs of a tensor, out of order, and others own none.
pub fn layout(tensors: &[(Vec<usize>, DType)], ranks: usize, seed: u64) -> RunLayout {
    let mut by_rank: Vec<Vec<Run>> = vec![Vec::new(); ranks];
    let draw = |n: usize, limit: usize| {
        (Seed::new(seed).derive(n as u64).as_u64() % limit.max(1) as u64) as usize
    };
    for (tensor, (shape, _)) in tensors.iter().enumerate() {
        let size: usize = shape.iter().product();
        let mut start = 0;
        let mut index = 0;
        while start < size {
            let n = tensor * 1000 + index;
            let end = size.min(start + 1 + draw(2 * n, size));
            let runs = &mut by_rank[draw(2 * n + 1, ranks)];
            let place = draw(n, runs.len() + 1);
            runs.insert(place, Run { tensor, items: start..end });
            start = end;
            index += 1;
        }
    }
    by_rank[draw(7, ranks)].push(Run { tensor: 0, items: 0..0 });
    RunLayout::new(format!("layout {seed}"), tensors.to_vec(), by_rank).unwrap()
}

/// Cuts a rank's runs out of full tensors.
///
/// # Errors
///
/// candle's, if the tensors do not fit the layout.
pub fn owned_runs(layout: &RunLayout, rank: usize, full: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut owned = Vec::new();
    for run in layout.runs(rank) {
        let items = full[run.tensor].flatten_all()?;
        owned.push(if run.items.is_empty() {
            Tensor::zeros(0, items.dtype(), items.device())?
        } else {
            items.narrow(0, run.items.start, run.items.len())?
        });
    }
    Ok(owned)
}

/// Returns the shapes and dtypes of small and large tensors, most of this dtype, no shape twice.
fn tensors(dtype: DType) -> Vec<(Vec<usize>, DType)> {
    vec![
        (vec![3, 5], dtype),
        (vec![7], DType::F32),
        (vec![], dtype),
        (vec![301, 200], dtype),
        (vec![0, 4], dtype),
        (vec![1000], DType::U32),
    ]
}

/// Returns numbers from a seed. Their sums depend on the order of summation.
fn values(shape: &[usize], dtype: DType, seed: u64, device: &Device) -> Result<Tensor> {
    let n_items: usize = shape.iter().product();
    let mut items = Vec::with_capacity(n_items);
    for n in 0..n_items {
        let word = Seed::new(seed).derive(n as u64).as_u64();
        items.push((word % 2003) as f32 * 0.0625);
    }
    Tensor::from_vec(items, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// Returns the tensors of a slot: numbers that differ from slot to slot.
fn slot_values(
    tensors: &[(Vec<usize>, DType)],
    slot: usize,
    seed: u64,
    device: &Device,
) -> Result<Vec<Tensor>> {
    let mut list = Vec::new();
    for (n, (shape, dtype)) in tensors.iter().enumerate() {
        list.push(values(shape, *dtype, seed + (slot * 100 + n) as u64, device)?);
    }
    Ok(list)
}

/// Gathers and reduces lists along some axes, and compares the results with collectives on single
/// tensors. Then starts several collectives at once, and waits in an order that differs by rank.
///
/// # Errors
///
/// The error of a failed collective.
///
/// # Panics
///
/// If a result differs.
pub fn check(ctx: &Replica, set: &MeshAxes, dtype: DType, seed: u64) -> Result<()> {
    let ranks = ctx.axis_size(set)?;
    let rank = ctx.axis_index(set)?;
    let tensors = tensors(dtype);
    let layout = layout(&tensors, ranks, seed);
    // The same on every rank, so that each knows the gathered tensors.
    let full = slot_values(&tensors, 1000, seed, ctx.device())?;
    let gathered = ctx.gather_runs(owned_runs(&layout, rank, &full)?, &layout, set)?;
    assert!(gathered.iter().all(|var| var.is_variable()));
    assert_same(&detached(&gathered), &full);

    let list = slot_values(&tensors, ctx.slot(), seed, ctx.device())?;
    let sums = list.iter().map(|x| ctx.psum(x, set)).collect::<Result<Vec<_>>>()?;
    let expected = owned_runs(&layout, rank, &sums)?;
    assert_same(&ctx.reduce_runs(list.clone(), &layout, set)?, &expected);

    // Several in flight.
    let first = ctx.start_gather_runs(owned_runs(&layout, rank, &full)?, &layout, set)?;
    let second = ctx.start_reduce_runs(list.clone(), &layout, set)?;
    let blocking = ctx.psum(&list[0], set)?;
    let third = start_sum(ctx, &list[0], set)?;
    let check_sums = |sums: Vec<Tensor>| assert_same(&sums, &expected);
    if rank == 0 {
        assert_same(&third.wait()?, &[blocking.flatten_all()?]);
        check_sums(second.wait()?);
        assert_same(&detached(&first.wait()?), &full);
    } else {
        assert_same(&detached(&first.wait()?), &full);
        check_sums(second.wait()?);
        assert_same(&third.wait()?, &[]);
    }
    assert_same(&[blocking], &sums[..1]);
    Ok(())
}

/// Starts the sum of a tensor, which the first rank gets.
///
/// # Errors
///
/// The errors of starting a collective.
pub fn start_sum(
    ctx: &Replica,
    x: &Tensor,
    axes: impl Into<MeshAxes>,
) -> Result<Pending<Vec<Tensor>>> {
    let axes = axes.into();
    let mut runs = vec![Vec::new(); ctx.axis_size(&axes)?];
    runs[0].push(Run { tensor: 0, items: 0..x.elem_count() });
    let layout = RunLayout::new("sum", [(x.shape().clone(), x.dtype())], runs);
    ctx.start_reduce_runs(vec![x.clone()], &layout.map_err(candle_core::Error::wrap)?, axes)
}

fn detached(vars: &[Var]) -> Vec<Tensor> {
    vars.iter().map(Var::as_detached_tensor).collect()
}
