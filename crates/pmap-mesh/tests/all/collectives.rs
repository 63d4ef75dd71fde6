//! Collectives at the sizes where engines change their method, and rules that random programs do
//! not check.

use candle_core::{DType, Device, Result, Tensor, Var, bail};
use pmap_mesh::{ALL, DeviceMesh, Error, Replica, ReplicaError, Uneven};
use process_tests::assert_same;

use crate::differential::{
    bits::REDUCIBLE,
    grid::Grid,
    layout::Layout,
    op::Op,
    pending::LARGE_BYTES,
    program::{ArrayRecipe, CallRoute, NumberKind, Program, ProgramStep},
    reference, tested,
};

/// Compares collectives over all axes of `grid` with the reference. Each replica passes its own
/// numbers.
fn check(grid: &[usize], calls: impl IntoIterator<Item = (Op, DType, Vec<usize>)>) {
    let grid = Grid(grid.to_vec());
    let mut steps = Vec::new();
    for (seed, (op, dtype, shape)) in (0..).zip(calls) {
        let value = steps.len();
        let numbers = ArrayRecipe { dtype, shape, kind: NumberKind::Ordinary, seed };
        steps.push(ProgramStep::Own { numbers, layout: Layout::Plain, free: None });
        steps.push(ProgramStep::Collective { op, value, axes: grid.all() });
    }
    let mesh = grid.builder().cpu().unwrap();
    let program = Program {
        grid,
        uneven: Uneven::Refuse,
        route: CallRoute::Call,
        arguments: Vec::new(),
        steps,
        results: Vec::new(),
    };
    tested::check(&program, &mesh, &reference::run(&program)).unwrap();
}

#[test]
fn reductions_around_shared_work_match_the_reference() {
    // From 16 KiB on, members share the work. Few of the sizes are divisible by 3.
    for grid in [&[3][..], &[2, 2]] {
        check(
            grid,
            [Op::Psum, Op::Pmean, Op::Pmax, Op::Pmin].into_iter().flat_map(|op| {
                [4095, 4096, 4097, 20_000].map(|len| (op.clone(), DType::F32, vec![len]))
            }),
        );
    }
    let sums = REDUCIBLE.map(|dtype| (Op::Psum, dtype, vec![LARGE_BYTES + 1]));
    check(&[2], sums);
}

#[test]
fn large_tensors_match_the_reference() {
    let ops = [
        Op::AllGather { dim: -1 },
        Op::PsumScatter { dim: 0 },
        Op::AllToAll { split: 0, concat: 1 },
        Op::Broadcast { root: 1 },
        Op::Ppermute { pairs: vec![(0, 2), (2, 1)] },
    ];
    let dtypes = [DType::F32, DType::BF16, DType::U8];
    check(&[3], ops.into_iter().flat_map(|op| dtypes.map(|d| (op.clone(), d, vec![6, 67, 50]))));
}

#[test]
fn invalid_arguments_are_rejected() {
    type Wrong = fn(&Replica, &Tensor) -> Result<Tensor>;
    let cases: [(Wrong, &str); 9] = [
        (|ctx, x| ctx.all_gather(x, 2, ALL), "out of range"),
        (|ctx, x| ctx.all_gather(x, -3, ALL), "out of range"),
        (|ctx, x| ctx.psum_scatter(x, 1, ALL), "does not split evenly"),
        (|ctx, x| ctx.all_to_all(x, 1, 0, ALL), "does not split evenly"),
        (|ctx, x| ctx.ppermute(x, &[(0, 2)], ALL), "outside a group of 2"),
        (|ctx, x| ctx.ppermute(x, &[(0, 1), (0, 0)], ALL), "a second time"),
        (|ctx, x| ctx.ppermute(x, &[(0, 1), (1, 1)], ALL), "a second time"),
        (|ctx, x| ctx.broadcast(x, 2, ALL), "rank 2 of a group of 2"),
        (|ctx, x| ctx.pmean(&x.to_dtype(DType::U8)?, ALL), "only floats have a mean"),
    ];
    let mesh = DeviceMesh::cpu(2).unwrap();
    for (wrong, text) in cases {
        let call = mesh
            .pmap(move |ctx, x: Tensor| wrong(ctx, &x))
            .call(Tensor::zeros((4, 3), DType::F32, &Device::Cpu).unwrap());
        let Err(Error::Replica(ReplicaError::Failed { slot: 0, cause, .. })) = call else {
            panic!("{text}: {call:?}")
        };
        assert!(cause.to_string().contains(text), "{cause}");
    }
}

/// Returns collectives of tensors with three dimensions in a group of two.
fn every_op() -> [Op; 10] {
    [
        Op::Psum,
        Op::Pmean,
        Op::Pmax,
        Op::Pmin,
        Op::Pvary,
        Op::AllGather { dim: 1 },
        Op::PsumScatter { dim: 0 },
        Op::Ppermute { pairs: vec![(0, 1)] },
        Op::AllToAll { split: 0, concat: 1 },
        Op::Broadcast { root: 1 },
    ]
}

#[test]
fn later_writes_change_no_result() {
    // The result of `pvary` is its argument.
    let ops = || every_op().into_iter().filter(|op| *op != Op::Pvary);
    for len in [2, 20_000] {
        on(2, move |ctx| {
            for op in ops() {
                let x = Tensor::full((ctx.slot() + 1) as f32, (2, 1, len), ctx.device())?;
                let expected = op.run(ctx, &x, ALL)?;
                let written = Var::from_tensor(&x)?;
                let result = op.run(ctx, &written.as_detached_tensor(), ALL)?;
                written.set(&written.zeros_like()?)?;
                ctx.barrier(ALL)?;
                assert_same(&[result], &[expected]);
            }
            Ok(Vec::new())
        });
    }
}

// Gradients.

#[test]
fn large_gradients_are_in_rank_order() {
    let (terms, len) = ([1e8_f32, 1.0, -1e8, 1.0], 20_001);
    let var = Var::ones(len, DType::F32, &Device::Cpu).unwrap();
    let gradients = on(4, move |ctx| {
        let loss = (ctx.pvary(&var, ALL)? * f64::from(terms[ctx.slot()]))?.sum_all()?;
        Ok(vec![gradient(&loss, &var)?])
    });
    let expected = Tensor::ones(len, DType::F32, &Device::Cpu).unwrap();
    for of_replica in gradients {
        assert_same(&of_replica, std::slice::from_ref(&expected));
    }
}

#[test]
fn uneven_gather_scatters_its_gradient() {
    // Above 16 KiB each rank sums its own rows.
    let gradients = on(2, |ctx| {
        let var = Var::zeros((3 - ctx.slot(), 4096), DType::F32, &Device::Cpu)?;
        let weights = Tensor::arange(1_f32, 6., &Device::Cpu)?.reshape((5, 1))?;
        let loss = ctx.all_gather(&var, 0, ALL)?.broadcast_mul(&weights)?.sum_all()?;
        Ok(vec![gradient(&loss, &var)?.narrow(1, 4095, 1)?.flatten_all()?])
    });
    let rows = gradients.iter().map(|of_replica| of_replica[0].to_vec1::<f32>().unwrap());
    assert_eq!(rows.collect::<Vec<_>>(), [vec![2., 4., 6.], vec![8., 10.]]);
}

#[test]
fn pmax_and_pmin_have_no_gradient() {
    for op in [Op::Pmax, Op::Pmin] {
        let mesh = DeviceMesh::cpu(2).unwrap();
        let call = mesh.pmap(move |ctx, x: Tensor| {
            let x = Var::from_tensor(&x)?;
            gradient(&op.run(ctx, &x, ALL)?.sum_all()?, &x)
        });
        let call = call.call(Tensor::zeros((2, 2), DType::F32, &Device::Cpu).unwrap());
        let Err(Error::Replica(ReplicaError::Failed { cause, .. })) = call else {
            panic!("{call:?}")
        };
        assert!(cause.to_string().contains("has no gradient"), "{cause}");
    }
}

#[test]
fn result_tracks_gradient_if_argument_does() {
    on(2, |ctx| {
        let var = Var::zeros((2, 2, 2), DType::F32, ctx.device())?;
        for op in every_op() {
            for (x, expected) in [(var.as_tensor(), true), (&var.as_detached_tensor(), false)] {
                if op.run(ctx, x, ALL)?.track_op() != expected {
                    bail!("{op:?} of an argument with gradient {expected}");
                }
            }
        }
        Ok(Vec::new())
    });
}

fn gradient(loss: &Tensor, var: &Var) -> Result<Tensor> {
    loss.backward()?.remove(var).ok_or_else(|| candle_core::Error::msg("no gradient"))
}

/// Returns the results of `f` on each replica.
fn on(
    slots: usize,
    f: impl Fn(&Replica) -> Result<Vec<Tensor>> + Send + Sync + 'static,
) -> Vec<Vec<Tensor>> {
    let mesh = DeviceMesh::builder().axis("a", slots).pin(false).cpu().unwrap();
    mesh.pmap(move |ctx, ()| f(ctx)).call_sharded(()).unwrap().shards().to_vec()
}
