//! Lists of tensors with runs owned by replicas: gathered, and reduced for their owners.

#![allow(clippy::cast_possible_truncation, reason = "sizes are small")]

use candle_core::{DType, Device, Result, Tensor, Var};
use pmap_mesh::{
    ALL, DeviceMesh, Error, Replica, ReplicaError,
    support::{Run, RunLayout},
};
use process_tests::{assert_same, lists, nothing};

/// Runs `f` on every slot of a grid.
fn everywhere(
    axes: &[(&str, usize)],
    f: impl Fn(&Replica) -> Result<()> + Send + Sync + 'static,
) -> pmap_mesh::Result<()> {
    let builder =
        axes.iter().fold(DeviceMesh::builder(), |builder, (name, size)| builder.axis(name, *size));
    let mesh = builder.pin(false).cpu()?;
    mesh.pmap(move |ctx, _: Tensor| f(ctx)).in_axes(None).call(nothing())
}

#[test]
fn gathered_tensors_are_shared_leaves() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let layout = lists::layout(&[(vec![4, 2], DType::F32)], 2, 0);
    let gather = mesh.pmap(move |ctx, _: Tensor| {
        let whole = Tensor::arange(0_f32, 8., &Device::Cpu)?.reshape((4, 2))?;
        let own = lists::owned_runs(&layout, ctx.slot(), &[whole])?;
        let leaf: Var = ctx.gather_runs(own, &layout, ALL)?.swap_remove(0);
        let grads = leaf.sqr()?.sum_all()?.backward()?;
        assert_same(&[grads.get(&leaf).unwrap().clone()], &[(leaf.as_tensor() * 2.0)?.detach()]);
        ctx.barrier(ALL)?;
        // All share one storage: a write of one replica is visible to all.
        if ctx.slot() == 0 {
            leaf.set(&leaf.zeros_like()?)?;
        }
        ctx.barrier(ALL)?;
        assert_eq!(leaf.sum_all()?.to_scalar::<f32>()?.to_bits(), 0);
        Ok(())
    });
    gather.in_axes(None).call(nothing()).unwrap();
}

#[test]
fn layout_mismatch_is_an_error() {
    let refused = |f: fn(&Replica, RunLayout) -> Result<()>| {
        let layout = lists::layout(&[(vec![3], DType::F32)], 2, 0);
        let outcome = everywhere(&[("a", 2), ("b", 1)], move |ctx| f(ctx, layout.clone()));
        match outcome.unwrap_err() {
            Error::Replica(ReplicaError::Failed { cause, .. }) => cause.to_string(),
            other => other.to_string(),
        }
    };
    let ranks = refused(|ctx, layout| ctx.gather_runs(Vec::new(), &layout, "b").map(drop));
    assert!(ranks.contains("a layout of 2 ranks in a group of 1"), "{ranks}");
    let count = refused(|ctx, layout| ctx.gather_runs(Vec::new(), &layout, "a").map(drop));
    assert!(count.contains("0 tensors for the "), "{count}");
    let size = refused(|ctx, layout| {
        let own =
            layout.runs(ctx.slot()).iter().map(|_| Tensor::zeros(9, DType::F32, &Device::Cpu));
        ctx.gather_runs(own.collect::<Result<_>>()?, &layout, "a").map(drop)
    });
    assert!(size.contains("is 9 items of f32, the layout says"), "{size}");
    let shape = refused(|ctx, layout| {
        ctx.reduce_runs(vec![Tensor::zeros(4, DType::F32, &Device::Cpu)?], &layout, "a").map(drop)
    });
    assert!(shape.contains("tensor 0 is f32 [4], the layout says f32 [3]"), "{shape}");
    let count = refused(|ctx, layout| ctx.reduce_runs(Vec::new(), &layout, "a").map(drop));
    assert!(count.contains("0 tensors for a layout of 1"), "{count}");
}

#[test]
fn gather_mismatch_names_both_layouts() {
    let error = everywhere(&[("a", 2)], |ctx| {
        let name = ["h.0", "h.1"][ctx.slot()];
        let run = |items| vec![Run { tensor: 0, items }];
        let layout = RunLayout::new(name, [(4, DType::F32)], [run(0..2), run(2..4)]).unwrap();
        ctx.gather_runs(vec![Tensor::zeros(2, DType::F32, &Device::Cpu)?], &layout, ALL).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("gather_runs(h.0, layout "), "{error}");
    assert!(error.contains("gather_runs(h.1, layout "), "{error}");
}

#[test]
fn set_after_sum_changes_no_result() {
    // Lists small enough that no replica waits until the others have read them.
    for slots in [1, 2] {
        everywhere(&[("a", slots)], move |ctx| {
            for _ in 0..100 {
                let x = Var::ones(2000, DType::F32, &Device::Cpu)?;
                let sums = ctx.psum_list("x", &vec![x.as_tensor().detach(); 2], ALL)?;
                x.set(&x.zeros_like()?)?;
                assert_eq!(sums[1].to_vec1::<f32>()?, vec![ctx.count() as f32; 2000]);
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn list_shape_mismatch_is_an_error() {
    for rows in [2, 2000] {
        let error = everywhere(&[("a", 2)], move |ctx| {
            let dims = if ctx.slot() == 0 { (rows, 3) } else { (3, rows) };
            let x = Tensor::zeros(dims, DType::F32, &Device::Cpu)?;
            ctx.psum_list("x", &[x.clone(), x], ALL).map(drop)
        });
        let error = error.unwrap_err().to_string();
        let shapes = format!("f32 [{rows}, 3] on rank 0 and f32 [3, {rows}] on rank 1");
        assert!(error.contains(&shapes), "{error}");
    }
}

#[test]
fn gradients_cross_a_sum_of_a_tree() {
    let outcome = everywhere(&[("a", 2)], |ctx| {
        let x = Var::new(&[1_f32 + ctx.slot() as f32, 3.], &Device::Cpu)?;
        let y = Var::new(2_f64, &Device::Cpu)?;
        let tree = (x.sqr()?, vec![(y.as_tensor() * 5.)?]);
        let (sums, means) = (ctx.psum(&tree, ALL)?, ctx.pmean(&tree, ALL)?);
        let loss = (sums.0.sum_all()?.to_dtype(DType::F64)? * sums.1[0].to_scalar::<f64>()?)?;
        let grads = (loss + (&means.1[0] * 4.)?)?.backward()?;
        let of_x = grads.get(&x).map(Tensor::to_vec1::<f32>).transpose()?;
        assert_eq!(of_x, Some(vec![40. * (1. + ctx.slot() as f32), 120.]));
        let of_y = grads.get(&y).map(Tensor::to_scalar::<f64>).transpose()?;
        assert_eq!(of_y, Some(10.));
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn tree_mismatch_names_both_calls() {
    let error = everywhere(&[("a", 2)], |ctx| {
        let x = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
        ctx.psum(&vec![x; 2 + ctx.slot()], ALL).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("psum of 2 tensors") && error.contains("psum of 3 tensors"), "{error}");
    let error = everywhere(&[("a", 2)], |ctx| {
        let x = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
        ctx.pmean(&(x.to_dtype(DType::U32)?, x), ALL).map(drop)
    });
    assert!(error.unwrap_err().to_string().contains("pmean of type u32 is not possible"));
}
