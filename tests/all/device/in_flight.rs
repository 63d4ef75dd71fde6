//! Collectives while other work is in flight: other collectives, or a thread that sets a variable.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_distributed::mesh::{
    ALL, DeviceMesh, P, Replica,
    support::{Run, RunLayout},
};

use super::meshes;

/// More items than one chunk of a transfer holds.
const ITEMS: usize = END as usize;
const END: u32 = 300_007;

/// Returns numbers of a slot, exact in single precision, that its device may still compute.
fn numbers(ctx: &Replica, round: usize) -> Result<Tensor> {
    let x = Tensor::arange(0_u32, END, ctx.device())?.to_dtype(DType::F32)?;
    x.affine((1 + ctx.slot()) as f64, round as f64)
}

/// Returns the sum of both slots' numbers.
fn sum(round: usize) -> Tensor {
    let x = Tensor::arange(0_u32, END, &Device::Cpu).unwrap();
    x.to_dtype(DType::F32).unwrap().affine(3.0, 2.0 * round as f64).unwrap()
}

fn items(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn pending_collectives_complete_in_any_order() {
    let run = |items| Run { tensor: 0, items };
    let layout =
        RunLayout::new("x", [(ITEMS, DType::F32)], [vec![run(0..7)], vec![run(7..ITEMS)]]).unwrap();
    for mesh in meshes() {
        let layout = layout.clone();
        let run = mesh.pmap(move |ctx, ()| {
            let [x, y] = [numbers(ctx, 1)?, numbers(ctx, 2)?];
            let own = &layout.runs(ctx.slot())[0].items;
            let sum_of = |x: Tensor| ctx.start_reduce_runs(vec![x], &layout, ALL);
            let first = sum_of(x.clone())?;
            let second = sum_of(y.clone())?;
            let sum = ctx.psum(&y, ALL)?;
            let own = sum.narrow(0, own.start, own.len())?;
            let third = ctx.start_gather_runs(vec![own], &layout, ALL)?;
            // Computed while the others are in flight.
            let last = sum_of(x.affine(1.0, 2.0)?)?;
            let one = |mut list: Vec<Tensor>| list.swap_remove(0);
            let whole = |mut gathered: Vec<Var>| gathered.swap_remove(0).into_inner();
            if ctx.slot() == 0 {
                let last = one(last.wait()?);
                let gathered = whole(third.wait()?);
                return Ok((one(second.wait()?), one(first.wait()?), last, gathered));
            }
            let first = one(first.wait()?);
            let reduced = one(second.wait()?);
            let gathered = whole(third.wait()?);
            Ok((reduced, first, one(last.wait()?), gathered))
        });
        let rows = P::shard(0, ALL);
        let run = run.out_axes([rows.clone(), rows.clone(), rows, P::replicate()]);
        let (second, first, last, gathered) = run.call(()).unwrap();
        assert_eq!(items(&second), items(&sum(2)));
        assert_eq!(items(&first), items(&sum(1)));
        assert_eq!(items(&last), items(&sum(3)));
        assert_eq!(items(&gathered), items(&sum(2)));
    }
}

#[test]
fn sums_tolerate_a_concurrent_set() {
    for mesh in meshes() {
        for device in mesh.devices() {
            let [old, new] = [1_f32, 2.].map(|value| Tensor::full(value, ITEMS, device).unwrap());
            let var = Var::from_tensor(&old).unwrap();
            let is_over = Arc::new(AtomicBool::new(false));
            let setter = thread::spawn({
                let var = var.clone();
                let is_over = Arc::clone(&is_over);
                move || {
                    while !is_over.load(Ordering::Acquire) {
                        for value in [&new, &old] {
                            var.set(value).unwrap();
                        }
                        // Otherwise the device's queue would grow without bound.
                        var.device().synchronize().unwrap();
                    }
                }
            });
            let home = device.clone();
            let run = mesh.pmap(move |ctx, ()| {
                let x = if ctx.device().same_device(&home) {
                    var.as_detached_tensor()
                } else {
                    Tensor::ones(ITEMS, DType::F32, ctx.device())?
                };
                for _ in 0..20 {
                    // The values are arbitrary; the calls must return.
                    ctx.psum(&x, ALL)?;
                    ctx.all_to_all(&x.narrow(0, 0, ITEMS - 1)?, 0, 0, ALL)?;
                    ctx.psum_list("x", &[x.clone(), x.clone()], ALL)?;
                }
                Tensor::new(0_f32, ctx.device())
            });
            run.out_axes(P::replicate()).call(()).unwrap();
            is_over.store(true, Ordering::Release);
            setter.join().unwrap();
        }
    }
}

#[test]
fn runs_gather_on_the_replicas_device() {
    let run = |items| Run { tensor: 0, items };
    for mesh in meshes() {
        let single = DeviceMesh::new(vec![mesh.devices()[0].clone()]).unwrap();
        for (mesh, runs) in [
            (single, vec![vec![run(0..ITEMS)]]),
            (mesh, vec![vec![run(0..7)], vec![run(7..ITEMS)]]),
        ] {
            let layout = RunLayout::new("x", [(ITEMS, DType::F32)], runs).unwrap();
            let gather = mesh.pmap(move |ctx, ()| {
                let own = &layout.runs(ctx.slot())[0].items;
                let all = Tensor::arange(0_f32, ITEMS as f32, &Device::Cpu)?;
                let own = all.narrow(0, own.start, own.len())?;
                let whole = ctx.gather_runs(vec![own], &layout, ALL)?.swap_remove(0);
                assert!(whole.device().same_device(ctx.device()));
                Ok(whole.into_inner())
            });
            let whole = gather.out_axes(P::replicate()).call(()).unwrap();
            let expected: Vec<f32> = (0..ITEMS).map(|n| n as f32).collect();
            assert_eq!(items(&whole), expected);
        }
    }
}
