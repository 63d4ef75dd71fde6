//! Collectives while something else is going on: others under way, a variable that is set.

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

/// More than any part that is moved at once.
const ITEMS: usize = END as usize;
const END: u32 = 300_007;

/// Numbers of a slot, exact in single precision, which its device may not have computed yet.
fn numbers(ctx: &Replica, round: usize) -> Result<Tensor> {
    let x = Tensor::arange(0_u32, END, ctx.device())?.to_dtype(DType::F32)?;
    x.affine((1 + ctx.slot()) as f64, round as f64)
}

/// The numbers of both slots added up.
fn sum(round: usize) -> Tensor {
    let x = Tensor::arange(0_u32, END, &Device::Cpu).unwrap();
    x.to_dtype(DType::F32).unwrap().affine(3.0, 2.0 * round as f64).unwrap()
}

fn items(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn what_is_started_may_be_waited_for_in_any_order() {
    let run = |items| Run { tensor: 0, items };
    let layout =
        RunLayout::new("x", [(ITEMS, DType::F32)], [vec![run(0..7)], vec![run(7..ITEMS)]]).unwrap();
    for mesh in meshes() {
        let layout = layout.clone();
        let run = mesh.pmap(move |ctx, ()| {
            let [x, y] = [numbers(ctx, 1)?, numbers(ctx, 2)?];
            let own = &layout.runs(ctx.slot())[0].items;
            let first = ctx.start_psum(&x, ALL)?;
            let second = ctx.start_reduce_runs(vec![y.clone()], &layout, ALL)?;
            let sum = ctx.psum(&y, ALL)?;
            let own = sum.narrow(0, own.start, own.len())?;
            let third = ctx.start_gather_runs(vec![own], &layout, ALL)?;
            // Computed while they are under way.
            let last = ctx.start_psum(&x.affine(1.0, 2.0)?, ALL)?;
            let whole = |mut gathered: Vec<Var>| gathered.swap_remove(0).into_inner();
            if ctx.slot() == 0 {
                let last = last.wait()?;
                let gathered = whole(third.wait()?);
                return Ok((second.wait()?.swap_remove(0), first.wait()?, gathered, last));
            }
            let first = first.wait()?;
            let reduced = second.wait()?.swap_remove(0);
            Ok((reduced, first, whole(third.wait()?), last.wait()?))
        });
        let run = run.out_axes([P::shard(0, ALL), P::replicate(), P::replicate(), P::replicate()]);
        let (reduced, first, gathered, last) = run.call(()).unwrap();
        assert_eq!(items(&reduced), items(&sum(2)));
        assert_eq!(items(&first), items(&sum(1)));
        assert_eq!(items(&gathered), items(&sum(2)));
        assert_eq!(items(&last), items(&sum(3)));
    }
}

#[test]
fn a_variable_may_be_set_while_replicas_sum_it() {
    for mesh in meshes() {
        for device in mesh.devices() {
            let [old, new] = [1_f32, 2.].map(|value| Tensor::full(value, ITEMS, device).unwrap());
            let var = Var::from_tensor(&old).unwrap();
            let is_over = Arc::new(AtomicBool::new(false));
            let setter = thread::spawn({
                let (var, is_over) = (var.clone(), Arc::clone(&is_over));
                move || {
                    while !is_over.load(Ordering::Acquire) {
                        for value in [&new, &old] {
                            var.set(value).unwrap();
                        }
                        // Or it would have more to do than it ever does.
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
                    // Whose values it has, nobody knows; that it ends is what counts.
                    ctx.psum(&x, ALL)?;
                    ctx.all_to_all(&x.narrow(0, 0, ITEMS - 1)?, 0, 0, ALL)?;
                    ctx.start_psum(&x, ALL)?.wait()?;
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
fn runs_on_another_device_are_gathered_where_the_replica_is() {
    let run = |items| Run { tensor: 0, items };
    for mesh in meshes() {
        let alone = DeviceMesh::new(vec![mesh.devices()[0].clone()]).unwrap();
        for (mesh, runs) in
            [(alone, vec![vec![run(0..ITEMS)]]), (mesh, vec![vec![run(0..7)], vec![run(7..ITEMS)]])]
        {
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
