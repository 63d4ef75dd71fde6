//! What every engine must make of lists of tensors of which each rank owns runs.

#![allow(clippy::cast_possible_truncation, reason = "what is drawn is below a small number")]

use std::slice;

use candle_core::{DType, Device, Result, Tensor, Var};
use core_types::Seed;
use pmap_mesh::{
    MeshAxes, Replica,
    support::{Run, RunLayout},
};

use crate::assert_same;

/// A layout of these tensors on so many ranks, cut at places that depend on the seed; some ranks
/// own several runs of a tensor, out of order, and some of them nothing.
pub fn layout(tensors: &[(Vec<usize>, DType)], ranks: usize, seed: u64) -> RunLayout {
    let mut by_rank: Vec<Vec<Run>> = vec![Vec::new(); ranks];
    let draw = |n: usize, below: usize| {
        (Seed::new(seed).derive(n as u64).as_u64() % below.max(1) as u64) as usize
    };
    for (tensor, (shape, _)) in tensors.iter().enumerate() {
        let size: usize = shape.iter().product();
        let mut start = 0;
        let mut n_th = 0;
        while start < size {
            let n = tensor * 1000 + n_th;
            let end = size.min(start + 1 + draw(2 * n, size));
            let of_rank = &mut by_rank[draw(2 * n + 1, ranks)];
            let place = draw(n, of_rank.len() + 1);
            of_rank.insert(place, Run { tensor, items: start..end });
            start = end;
            n_th += 1;
        }
    }
    by_rank[draw(7, ranks)].push(Run { tensor: 0, items: 0..0 });
    RunLayout::new(format!("layout {seed}"), tensors.to_vec(), by_rank).unwrap()
}

/// The runs of whole tensors that a rank owns.
///
/// # Errors
///
/// candle's, if the tensors are not those of the layout.
pub fn own(layout: &RunLayout, rank: usize, wholes: &[Tensor]) -> Result<Vec<Tensor>> {
    let run = |run: &Run| {
        let items = wholes[run.tensor].flatten_all()?;
        if run.items.is_empty() {
            return Tensor::zeros(0, items.dtype(), items.device());
        }
        items.narrow(0, run.items.start, run.items.len())
    };
    layout.runs(rank).iter().map(run).collect()
}

/// Tensors of small and of large size, no two of one shape; most of this type.
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

/// Numbers that depend on a seed, and whose sums depend on their order.
fn values(shape: &[usize], dtype: DType, seed: u64, device: &Device) -> Result<Tensor> {
    let n_items: usize = shape.iter().product();
    let value = |n: usize| {
        let word = Seed::new(seed).derive(n as u64).as_u64();
        (word % 2003) as f32 * 0.0625
    };
    Tensor::from_vec((0..n_items).map(value).collect::<Vec<f32>>(), shape, &Device::Cpu)?
        .to_dtype(dtype)?
        .to_device(device)
}

/// Gathers and reduces lists along some axes, also several at a time and waited for in an order
/// that differs by rank, and compares with what single tensors give.
///
/// # Errors
///
/// Those of the collectives.
///
/// # Panics
///
/// If a result differs.
pub fn check(ctx: &Replica, set: &MeshAxes, dtype: DType, seed: u64) -> Result<()> {
    let (ranks, rank) = (ctx.axis_size(set)?, ctx.axis_index(set)?);
    let tensors = tensors(dtype);
    let layout = layout(&tensors, ranks, seed);
    let of_slot = |slot: usize| -> Result<Vec<Tensor>> {
        let value = |(n, (shape, dtype)): (usize, &(Vec<usize>, DType))| {
            values(shape, *dtype, seed + (slot * 100 + n) as u64, ctx.device())
        };
        tensors.iter().enumerate().map(value).collect()
    };
    // What is to be gathered, all ranks of the group can make.
    let wholes = of_slot(1000)?;
    let gather = |own| ctx.gather_runs(own, &layout, set);
    let gathered = gather(own(&layout, rank, &wholes)?)?;
    assert!(gathered.iter().all(|var| var.is_variable()));
    assert_same(&detached(&gathered), &wholes);

    let list = of_slot(ctx.slot())?;
    let sums = list.iter().map(|x| ctx.psum(x, set)).collect::<Result<Vec<_>>>()?;
    let expected = own(&layout, rank, &sums)?;
    assert_same(&ctx.reduce_runs(list.clone(), &layout, set)?, &expected);

    // Several at a time.
    let first = ctx.start_gather_runs(own(&layout, rank, &wholes)?, &layout, set)?;
    let second = ctx.start_reduce_runs(list.clone(), &layout, set)?;
    let third = ctx.start_psum(&list[3], set)?;
    let between = ctx.psum(&list[0], set)?;
    let fourth = ctx.start_psum(&list[0], set)?;
    let check_sums = |sums: Vec<Tensor>| assert_same(&sums, &expected);
    if rank == 0 {
        assert_same(&[fourth.wait()?], slice::from_ref(&between));
        assert_same(&[third.wait()?], &sums[3..4]);
        check_sums(second.wait()?);
        assert_same(&detached(&first.wait()?), &wholes);
    } else {
        assert_same(&detached(&first.wait()?), &wholes);
        check_sums(second.wait()?);
        assert_same(&[third.wait()?], &sums[3..4]);
        assert_same(&[fourth.wait()?], slice::from_ref(&between));
    }
    assert_same(&[between], &sums[..1]);
    Ok(())
}

fn detached(vars: &[Var]) -> Vec<Tensor> {
    vars.iter().map(Var::as_detached_tensor).collect()
}
