//! Collectives compared with a serial model: results to the bit, and gradients.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "the model computes every type in f64"
)]

use std::{array, iter, sync::Arc};

use candle_core::{D, DType, Device, Result, Tensor, Var, bail};
use core_types::Seed;
use half::{bf16, f16};
use pmap_mesh::{ALL, DeviceMesh, Error, MeshAxes, Replica, ReplicaError};

const NAMES: [&str; 3] = ["a", "b", "c"];
const DTYPES: [DType; 7] =
    [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8, DType::U32, DType::I64];

#[test]
fn collectives_match_the_model() {
    for grid in [&[1][..], &[2], &[3], &[4], &[2, 2, 2]] {
        let sets = subsets(grid.len());
        let steps = sets.iter().flat_map(|set| {
            let ops = every_op(size_along(grid, set));
            ops.into_iter().flat_map(move |op| DTYPES.map(|dtype| (set.clone(), op.clone(), dtype)))
        });
        let steps = steps.filter(|(_, op, dtype)| op.takes(*dtype)).zip(0..).map(
            |((set, op, dtype), seed)| {
                let group = size_along(grid, &set);
                Step {
                    op,
                    set,
                    dtype,
                    shape: vec![2 * group, 3, group],
                    view: View::nth(seed),
                    seed,
                }
            },
        );
        check(grid, steps.collect());
    }
}

#[test]
fn reductions_of_every_size_match_the_model() {
    // Sizes around 16 KiB of f32, where members begin to share the work, and far above; few are
    // divisible by 3.
    let sizes = [0, 1, 2, 7, 4095, 4096, 4097, 20_000, 20_001];
    for grid in [&[2][..], &[3], &[2, 2]] {
        let steps = sizes.into_iter().flat_map(|len| {
            let ops = [Op::Psum, Op::Pmean, Op::Pmax, Op::Pmin, Op::Pvary].into_iter();
            ops.map(move |op| step(op, grid, DType::F32, vec![len]))
        });
        check(grid, steps.collect());
    }
}

#[test]
fn large_tensors_match_the_model() {
    for grid in [&[2][..], &[3]] {
        let group = grid[0];
        let steps = DTYPES.into_iter().zip(0..).flat_map(|(dtype, n)| {
            let width = (64 << 10) / dtype.size_in_bytes() / (2 * group * 67) + 1;
            let shape = vec![2 * group, 67, width];
            let ops =
                [Op::Psum, Op::Pmax, Op::AllGather(-1), Op::PsumScatter(0), Op::AllToAll(0, 1)]
                    .into_iter();
            ops.map(move |op| Step { view: View::nth(n), ..step(op, grid, dtype, shape.clone()) })
        });
        check(grid, steps.collect());
    }
}

#[test]
fn scalars_are_reduced_and_sent() {
    let ops =
        [Op::Psum, Op::Pmean, Op::Pmax, Op::Ppermute(vec![(0, 2)]), Op::Broadcast(1), Op::Barrier];
    check(&[3], ops.into_iter().map(|op| step(op, &[3], DType::F32, Vec::new())).collect());
}

#[test]
fn gather_accepts_empty_parts() {
    let gathered = on(&DeviceMesh::cpu(3).unwrap(), |ctx| {
        let x = Tensor::full(ctx.slot() as f32, (2, ctx.slot()), ctx.device())?;
        Ok(vec![ctx.all_gather(&x, 1, ALL)?])
    });
    let expected = Array { shape: vec![2, 3], items: vec![1., 2., 2., 1., 2., 2.] };
    for of_replica in gathered {
        assert!(Array::from_tensor(&of_replica[0]).same(&expected));
    }
}

#[test]
fn ranks_follow_the_mesh_order() {
    let mesh = mesh(&[2, 3, 2]);
    let seats = on(&mesh, |ctx| {
        let axis_set =
            [[].into(), "a".into(), "c".into(), ["a", "c"].into(), ["c", "a"].into(), ALL];
        let seats: Vec<Vec<u32>> = axis_set
            .iter()
            .map(|axes| Ok(vec![ctx.axis_index(axes)? as u32, ctx.axis_size(axes)? as u32]))
            .collect::<Result<_>>()?;
        Ok(vec![Tensor::new(seats, ctx.device())?])
    });
    for (slot, of_replica) in (0..).zip(&seats) {
        let (a, c) = (slot / 6, slot % 2);
        let expected = [[0, 1], [a, 2], [c, 2], [2 * a + c, 4], [2 * a + c, 4], [slot, 12]];
        assert_eq!(of_replica[0].to_vec2::<u32>().unwrap(), expected);
    }
}

#[test]
fn sums_are_in_rank_order() {
    let terms = [1e8_f32, 1.0, -1e8, 1.0];
    let in_order = terms.iter().sum::<f32>();
    assert!((in_order - 1.0).abs() < f32::EPSILON, "the order matters");
    for len in [1, 10_000] {
        let sums = on(&DeviceMesh::cpu(4).unwrap(), move |ctx| {
            let x = Tensor::full(terms[ctx.slot()], len, ctx.device())?;
            iter::repeat_with(|| ctx.psum(&x, ALL)).take(50).collect()
        });
        for sum in sums.iter().flatten() {
            let sum: Vec<f32> = sum.to_vec1().unwrap();
            assert!(sum.iter().all(|item| item.to_bits() == in_order.to_bits()));
        }
    }
}

#[test]
fn halves_are_summed_in_f32() {
    // In one-by-one sums neither dtype would keep the small terms: 256 + 1 is 256 in bf16, 2048 + 1
    // is 2048 in f16.
    for (dtype, large) in [(DType::BF16, 256.0), (DType::F16, 2048.0)] {
        for len in [1, 40_000] {
            let sums = on(&DeviceMesh::cpu(4).unwrap(), move |ctx| {
                let term = if ctx.slot() == 0 { large } else { 1.0 };
                let x = Tensor::full(term, len, ctx.device())?.to_dtype(dtype)?;
                Ok(vec![ctx.psum(&x, ALL)?, ctx.psum_scatter(&Tensor::cat(&[&x; 4], 0)?, 0, ALL)?])
            });
            let expected = round(dtype, large + 3.0);
            assert!(expected > large);
            for sum in sums.iter().flatten() {
                assert!(
                    Array::from_tensor(sum)
                        .same(&Array { shape: vec![len], items: vec![expected; len] })
                );
            }
        }
    }
}

#[test]
fn integers_wrap() {
    let sums = on(&DeviceMesh::cpu(3).unwrap(), |ctx| {
        let device = ctx.device();
        let sum = |x: Tensor| ctx.psum(&x, ALL);
        Ok(vec![
            sum(Tensor::new(&[200_u8], device)?)?,
            sum(Tensor::new(&[u32::MAX], device)?)?,
            sum(Tensor::new(&[i64::MAX], device)?)?,
        ])
    });
    for of_replica in sums {
        assert_eq!(of_replica[0].to_vec1::<u8>().unwrap(), [88]);
        assert_eq!(of_replica[1].to_vec1::<u32>().unwrap(), [u32::MAX - 2]);
        assert_eq!(of_replica[2].to_vec1::<i64>().unwrap(), [i64::MAX - 2]);
    }
}

#[test]
fn nan_wins_maximum_and_minimum() {
    for nan in 0..3 {
        let extremes = on(&DeviceMesh::cpu(3).unwrap(), move |ctx| {
            let x = if ctx.slot() == nan { f32::NAN } else { ctx.slot() as f32 };
            let x = Tensor::new(&[x, 1.0], ctx.device())?;
            Ok(vec![ctx.pmax(&x, ALL)?, ctx.pmin(&x, ALL)?])
        });
        for extreme in extremes.iter().flatten() {
            let items: Vec<f32> = extreme.to_vec1().unwrap();
            assert!(items[0].is_nan() && items[1].to_bits() == 1_f32.to_bits());
        }
    }
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

#[test]
fn later_writes_change_no_result() {
    let overwritten = |ctx: &Replica, step: &Step| {
        let x = Var::from_tensor(&step.tensor(ctx.slot()))?;
        let result = step.op.run(ctx, &x.as_tensor().detach(), axes(&step.set))?;
        x.set(&x.zeros_like()?)?;
        ctx.barrier(ALL)?;
        Ok(result)
    };
    for len in [2, 20_000] {
        let steps = every_op(2)
            .into_iter()
            .filter(Op::communicates)
            .map(|op| step(op, &[2], DType::F32, vec![2, len]));
        check_with(&[2], steps.collect(), overwritten);
    }
}

#[test]
fn random_collectives_match_the_model() {
    let (grid, mut random) = ([2, 2], Random(Seed::new(0xC0_11EC), 0));
    for _ in 0..50 {
        let steps = iter::repeat_with(|| random.step(&grid)).take(200);
        check(&grid, steps.collect());
    }
}

// Gradients.

#[test]
fn backward_matches_finite_differences() {
    for grid in [&[1][..], &[2], &[3], &[2, 2]] {
        for set in subsets(grid.len()) {
            let group = size_along(grid, &set);
            for (op, seed) in every_op(group).into_iter().filter(Op::has_gradient).zip(0..) {
                let shape = vec![2 * group, 2, group];
                check_gradient(
                    grid,
                    &Step {
                        op,
                        set: set.clone(),
                        dtype: DType::F64,
                        shape,
                        view: View::Plain,
                        seed,
                    },
                );
            }
        }
    }
}

/// Compares gradients with central differences. Losses are the sum of weight × sin(y); a result
/// that all replicas share is counted once.
fn check_gradient(grid: &[usize], step: &Step) {
    let counted_once = matches!(step.op, Op::Psum | Op::Pmean);
    let seats = seats(grid, &step.set);
    let counts = |slot: usize| !counted_once || seats[slot].1 == 0;
    let weights_of = {
        let (seats, seed) = (seats.clone(), step.seed);
        move |slot: usize, shape: &[usize]| {
            let owner = if counted_once { seats[slot].0[0] } else { slot };
            let mut random = Random(Seed::new(seed).derive(1_000), owner as u64 * 1_000);
            Array::from_fn(shape, |_| random.unit())
        }
    };
    let objective = |inputs: &[Array]| {
        let outputs =
            step.model(grid, inputs).into_iter().enumerate().filter(|(slot, _)| counts(*slot));
        let losses = outputs.map(|(slot, y)| {
            let weights = weights_of(slot, &y.shape).items;
            y.items.iter().zip(weights).map(|(y, weight)| y.sin() * weight).sum::<f64>()
        });
        losses.sum::<f64>()
    };
    let mut inputs = step.inputs(grid);
    let expected: Vec<Vec<f64>> =
        (0..inputs.len()).map(|slot| central_differences(&mut inputs, slot, &objective)).collect();

    let (shared, weights_of) = (step.clone(), weights_of.clone());
    let gradients = on(&mesh(grid), move |ctx| {
        let x = Var::from_tensor(&shared.tensor(ctx.slot()))?;
        let y = shared.op.run(ctx, &x, axes(&shared.set))?;
        let weights = weights_of(ctx.slot(), y.dims()).tensor(DType::F64);
        Ok(vec![gradient(&(y.sin()? * weights)?.sum_all()?, &x)?])
    });
    for (slot, (of_replica, expected)) in gradients.iter().zip(expected).enumerate() {
        close(
            &Array::from_tensor(&of_replica[0]).items,
            &expected,
            1e-6,
            &format!("{step:?} on {slot} of {grid:?}"),
        );
    }
}

fn central_differences(
    inputs: &mut [Array],
    slot: usize,
    objective: &impl Fn(&[Array]) -> f64,
) -> Vec<f64> {
    let step = 1e-5;
    let len = inputs[slot].items.len();
    let mut derivatives = Vec::with_capacity(len);
    for item in 0..len {
        let mut loss_at = |offset: f64| {
            let original = inputs[slot].items[item];
            inputs[slot].items[item] = original + offset;
            let value = objective(inputs);
            inputs[slot].items[item] = original;
            value
        };
        derivatives.push((loss_at(step) - loss_at(-step)) / (2.0 * step));
    }
    derivatives
}

#[test]
fn pvary_sums_gradients_of_shared_variable() {
    for grid in [&[1][..], &[3], &[2, 2]] {
        for set in subsets(grid.len()) {
            let seats = seats(grid, &set);
            let x = Array::from_fn(&[2, 2], |index| (index[0] * 2 + index[1]) as f64 * 0.3 - 0.4);
            // The loss of a slot is the sum of sin((slot + 1) × x).
            let derivative = |slot: usize| {
                x.items.iter().map(move |x| (slot + 1) as f64 * ((slot + 1) as f64 * x).cos())
            };
            let (var, axis_set) = (Var::from_tensor(&x.tensor(DType::F64)).unwrap(), set.clone());
            let gradients = on(&mesh(grid), move |ctx| {
                let y = (ctx.pvary(&var, axes(&axis_set))? * (ctx.slot() + 1) as f64)?;
                Ok(vec![gradient(&y.sin()?.sum_all()?, &var)?])
            });
            for (slot, of_replica) in gradients.iter().enumerate() {
                let mut expected = vec![0.0; 4];
                for &member in &seats[slot].0 {
                    expected
                        .iter_mut()
                        .zip(derivative(member))
                        .for_each(|(sum, term)| *sum += term);
                }
                close(
                    &Array::from_tensor(&of_replica[0]).items,
                    &expected,
                    1e-12,
                    &format!("{set:?} of {grid:?}"),
                );
            }
        }
    }
}

#[test]
fn large_gradients_are_in_rank_order() {
    let (terms, len) = ([1e8_f32, 1.0, -1e8, 1.0], 20_001);
    let var = Var::ones(len, DType::F32, &Device::Cpu).unwrap();
    let gradients = on(&DeviceMesh::cpu(4).unwrap(), move |ctx| {
        let loss = (ctx.pvary(&var, ALL)? * f64::from(terms[ctx.slot()]))?.sum_all()?;
        Ok(vec![gradient(&loss, &var)?])
    });
    for of_replica in gradients {
        assert!(
            Array::from_tensor(&of_replica[0])
                .same(&Array { shape: vec![len], items: vec![1.0; len] })
        );
    }
}

#[test]
fn uneven_gather_scatters_its_gradient() {
    // Above 16 KiB each rank sums its own rows.
    let gradients = on(&DeviceMesh::cpu(2).unwrap(), |ctx| {
        let var = Var::zeros((3 - ctx.slot(), 4096), DType::F32, &Device::Cpu)?;
        let weights = Tensor::arange(1_f32, 6., &Device::Cpu)?.reshape((5, 1))?;
        let loss = ctx.all_gather(&var, 0, ALL)?.broadcast_mul(&weights)?.sum_all()?;
        Ok(vec![gradient(&loss, &var)?])
    });
    for (slot, of_replica) in gradients.iter().enumerate() {
        let expected = |index: &[usize]| (2 * (3 * slot + index[0] + 1)) as f64;
        let expected = Array::from_fn(&[3 - slot, 4096], expected);
        assert!(Array::from_tensor(&of_replica[0]).same(&expected), "{slot}");
    }
}

#[test]
fn megatron_split_matches_full_gradients() {
    let random = |seed: u64, shape: &[usize]| {
        let mut random = Random(Seed::new(77), seed * 10_000);
        Var::from_tensor(&Array::from_fn(shape, |_| random.unit()).tensor(DType::F64)).unwrap()
    };
    let (x, up, down) = (random(1, &[3, 4]), random(2, &[4, 8]), random(3, &[8, 4]));
    let target = random(4, &[3, 4]).as_tensor().detach();
    let loss = |y: &Tensor, target: &Tensor| y.sub(target)?.sqr()?.sum_all();
    let whole = {
        let y = x.matmul(&up).unwrap().gelu().unwrap().matmul(&down).unwrap();
        let gradients = loss(&y, &target).unwrap().backward().unwrap();
        [&x, &up, &down].map(|var| Array::from_tensor(gradients.get(var).unwrap()))
    };
    for (grid, axis) in
        [(&[1][..], "a"), (&[2], "a"), (&[4], "a"), (&[2, 2], "b"), (&[2, 2, 2], "c")]
    {
        let (x, up, down, target) = (x.clone(), up.clone(), down.clone(), target.clone());
        let gradients = on(&mesh(grid), move |ctx| {
            let (size, rank) = (ctx.axis_size(axis)?, ctx.axis_index(axis)?);
            let part = |var: &Var, dim| {
                Var::from_tensor(&var.narrow(dim, rank * 8 / size, 8 / size)?.contiguous()?)
            };
            let (up, down) = (part(&up, 1)?, part(&down, 0)?);
            let hidden = ctx.pvary(&x, axis)?.matmul(&up)?.gelu()?;
            let y = ctx.psum(&hidden.matmul(&down)?, axis)?;
            let gradients = loss(&y, &target)?.backward()?;
            let gradient_of = |var: &Var| {
                gradients.get(var).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"))
            };
            let (of_up, of_down) = (gradient_of(&up)?.detach(), gradient_of(&down)?.detach());
            Ok(vec![
                gradient_of(&x)?,
                ctx.all_gather(&of_up, 1, axis)?,
                ctx.all_gather(&of_down, 0, axis)?,
            ])
        });
        for of_replica in &gradients {
            for (found, expected) in of_replica.iter().zip(&whole) {
                assert_eq!(found.dims(), expected.shape);
                close(
                    &Array::from_tensor(found).items,
                    &expected.items,
                    1e-12,
                    &format!("{grid:?}"),
                );
            }
        }
    }
}

#[test]
fn gradient_crosses_several_collectives() {
    // Fully sharded: the weights are gathered and applied to each replica's input, and the loss is
    // the sum of the results.
    let weights = Array::from_fn(&[4, 2], |index| (index[0] * 2 + index[1]) as f64 * 0.1);
    let input =
        |slot: usize| Array::from_fn(&[1, 4], |index| (slot * 4 + index[1]) as f64 * 0.2 - 1.0);
    let serial = {
        let var = Var::from_tensor(&weights.tensor(DType::F64)).unwrap();
        let loss = (0..2).map(|slot| {
            input(slot).tensor(DType::F64).matmul(&var).unwrap().sin().unwrap().sum_all().unwrap()
        });
        gradient(&loss.reduce(|sum, loss| (sum + loss).unwrap()).unwrap(), &var).unwrap()
    };
    let gradients = on(&DeviceMesh::cpu(2).unwrap(), move |ctx| {
        let shard = Var::from_tensor(
            &weights.tensor(DType::F64).narrow(0, ctx.slot() * 2, 2)?.contiguous()?,
        )?;
        let whole = ctx.all_gather(&shard, 0, ALL)?;
        let y = input(ctx.slot()).tensor(DType::F64).matmul(&whole)?;
        let loss = ctx.psum(&y.sin()?.sum_all()?, ALL)?;
        Ok(vec![ctx.all_gather(&gradient(&loss, &shard)?.detach(), 0, ALL)?])
    });
    for of_replica in gradients {
        close(
            &Array::from_tensor(&of_replica[0]).items,
            &Array::from_tensor(&serial).items,
            1e-12,
            "gathered weights",
        );
    }
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
    let tracked = on(&DeviceMesh::cpu(2).unwrap(), |ctx| {
        let var = Var::zeros((2, 2, 2), DType::F32, ctx.device())?;
        for op in every_op(2).into_iter().filter(|op| !matches!(op, Op::Barrier)) {
            for (x, expected) in
                [(var.as_tensor().clone(), true), (var.as_tensor().detach(), false)]
            {
                if op.run(ctx, &x, ALL)?.track_op() != expected {
                    bail!("{op:?} of an argument with gradient {expected}");
                }
            }
        }
        Ok(Vec::new())
    });
    assert_eq!(tracked.len(), 2);
}

fn gradient(loss: &Tensor, var: &Var) -> Result<Tensor> {
    loss.backward()?.remove(var).ok_or_else(|| candle_core::Error::msg("no gradient"))
}

fn close(found: &[f64], expected: &[f64], tolerance: f64, label: &str) {
    assert_eq!(found.len(), expected.len(), "{label}");
    assert!(
        found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= tolerance * b.abs().max(1.0)),
        "{label}: {found:?} for {expected:?}"
    );
}

// The steps and their comparison.

/// One collective, called by all replicas of each group along `set`.
#[derive(Clone, Debug)]
struct Step {
    op: Op,
    /// The indexes of the axes.
    set: Vec<usize>,
    dtype: DType,
    shape: Vec<usize>,
    view: View,
    seed: u64,
}

/// The memory layout of an argument.
#[derive(Clone, Copy, Debug)]
enum View {
    Plain,
    Transposed,
    Narrowed,
}

#[derive(Clone, Debug)]
enum Op {
    Psum,
    Pmean,
    Pmax,
    Pmin,
    Pvary,
    AllGather(isize),
    PsumScatter(isize),
    Ppermute(Vec<(usize, usize)>),
    AllToAll(isize, isize),
    Broadcast(usize),
    Barrier,
}

fn step(op: Op, grid: &[usize], dtype: DType, shape: Vec<usize>) -> Step {
    let seed = shape.iter().product::<usize>() as u64;
    Step { op, set: (0..grid.len()).collect(), dtype, shape, view: View::Plain, seed }
}

/// Returns every kind of collective of three-dimensional tensors in a group of this size.
fn every_op(group: usize) -> Vec<Op> {
    let shift: Vec<_> = (0..group).map(|n| (n, (n + 1) % group)).collect();
    let halfway = shift[..group / 2].to_vec();
    let mut ops = vec![Op::Psum, Op::Pmean, Op::Pmax, Op::Pmin, Op::Pvary, Op::Barrier];
    ops.extend([0, 1, -1, -2].map(Op::AllGather));
    ops.extend([0, -1].map(Op::PsumScatter));
    ops.extend(
        [(0, 0), (0, 1), (0, -1), (-1, 0), (-1, 1)]
            .map(|(split, concat)| Op::AllToAll(split, concat)),
    );
    ops.extend([shift, halfway, vec![(0, 0)], Vec::new()].map(Op::Ppermute));
    ops.extend([0, group - 1].map(Op::Broadcast));
    ops
}

fn check(grid: &[usize], steps: Vec<Step>) {
    check_with(grid, steps, |ctx, step| {
        step.op.run(ctx, &step.tensor(ctx.slot()), axes(&step.set))
    });
}

/// Runs the steps in one call, and compares every replica's results with the model.
fn check_with(grid: &[usize], steps: Vec<Step>, run: fn(&Replica, &Step) -> Result<Tensor>) {
    let steps = Arc::new(steps);
    let shared = Arc::clone(&steps);
    let found = on(&mesh(grid), move |ctx| shared.iter().map(|step| run(ctx, step)).collect());
    for (n, step) in steps.iter().enumerate() {
        for (slot, expected) in step.model(grid, &step.inputs(grid)).iter().enumerate() {
            assert_eq!(found[slot][n].dtype(), step.dtype, "{step:?} on {slot} of {grid:?}");
            let found = Array::from_tensor(&found[slot][n]);
            let head = |array: &Array| {
                format!("{:?} {:?}", array.shape, array.items.iter().take(12).collect::<Vec<_>>())
            };
            assert!(
                found.same(expected),
                "{step:?} on {slot} of {grid:?}: {} for {}",
                head(&found),
                head(expected)
            );
        }
    }
}

/// Returns the results of `f` on each replica.
fn on(
    mesh: &DeviceMesh,
    f: impl Fn(&Replica) -> Result<Vec<Tensor>> + Send + Sync + 'static,
) -> Vec<Vec<Tensor>> {
    let none = Tensor::zeros(mesh.len(), DType::U8, &Device::Cpu).unwrap();
    mesh.pmap(move |ctx, _: Tensor| f(ctx)).call_sharded(none).unwrap().shards().to_vec()
}

fn mesh(grid: &[usize]) -> DeviceMesh {
    let builder = DeviceMesh::builder().pin(false);
    grid.iter()
        .zip(NAMES)
        .fold(builder, |builder, (&size, name)| builder.axis(name, size))
        .cpu()
        .unwrap()
}

fn axes(set: &[usize]) -> MeshAxes {
    match *set {
        [] => [].into(),
        [axis] => NAMES[axis].into(),
        [one, other] => [NAMES[one], NAMES[other]].into(),
        _ => ALL,
    }
}

fn subsets(axes: usize) -> Vec<Vec<usize>> {
    (0..1_usize << axes)
        .map(|set| (0..axes).filter(|axis| set >> axis & 1 == 1).collect())
        .collect()
}

fn size_along(grid: &[usize], set: &[usize]) -> usize {
    set.iter().map(|&axis| grid[axis]).product()
}

/// Returns the group of each slot, and the slot's rank in it.
fn seats(grid: &[usize], set: &[usize]) -> Vec<(Vec<usize>, usize)> {
    let coordinate =
        |slot: usize, axis: usize| slot / grid[axis + 1..].iter().product::<usize>() % grid[axis];
    let slots = 0..grid.iter().product::<usize>();
    let together = |left: usize, right: usize| {
        (0..grid.len())
            .all(|axis| set.contains(&axis) || coordinate(left, axis) == coordinate(right, axis))
    };
    slots
        .clone()
        .map(|slot: usize| {
            let members: Vec<usize> =
                slots.clone().filter(|&other| together(slot, other)).collect();
            let rank = members.iter().position(|&member| member == slot).unwrap();
            (members, rank)
        })
        .collect()
}

impl View {
    fn nth(n: u64) -> Self {
        [Self::Plain, Self::Transposed, Self::Narrowed][(n % 3) as usize]
    }

    fn apply(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Transposed if x.rank() > 1 => {
                x.transpose(0, D::Minus1)?.contiguous()?.transpose(0, D::Minus1)
            }
            Self::Narrowed if x.rank() > 0 => {
                let len = x.dim(D::Minus1)?;
                Tensor::cat(&[&x.zeros_like()?, x, &x.ones_like()?], D::Minus1)?.narrow(
                    D::Minus1,
                    len,
                    len,
                )
            }
            _ => Ok(x.clone()),
        }
    }
}

impl Step {
    /// Returns the argument of replica `slot`; sizes differ where they may.
    fn input(&self, slot: usize) -> Array {
        let mut shape = self.shape.clone();
        if let Op::AllGather(dim) = self.op {
            shape[axis_of(dim, self.shape.len())] += slot % 3;
        }
        let mut random = Random(Seed::new(self.seed).derive(slot as u64), 0);
        Array::from_fn(&shape, |_| random.value(self.dtype))
    }

    fn inputs(&self, grid: &[usize]) -> Vec<Array> {
        (0..grid.iter().product()).map(|slot| self.input(slot)).collect()
    }

    fn tensor(&self, slot: usize) -> Tensor {
        self.view.apply(&self.input(slot).tensor(self.dtype)).unwrap()
    }

    /// Returns the expected result of each replica.
    fn model(&self, grid: &[usize], inputs: &[Array]) -> Vec<Array> {
        let seats = seats(grid, &self.set);
        seats
            .iter()
            .map(|(members, rank)| {
                let passed: Vec<&Array> = members.iter().map(|&member| &inputs[member]).collect();
                self.op.model(&passed, *rank, self.dtype)
            })
            .collect()
    }
}

impl Op {
    fn takes(&self, dtype: DType) -> bool {
        dtype.is_float() || !matches!(self, Self::Pmean)
    }

    /// Returns true if the gradient is the derivative of the sum of all losses. For `pvary` it is
    /// the derivative by a shared argument.
    fn has_gradient(&self) -> bool {
        !matches!(self, Self::Pmax | Self::Pmin | Self::Pvary | Self::Barrier)
    }

    /// Returns true if the result is a new tensor.
    fn communicates(&self) -> bool {
        !matches!(self, Self::Pvary | Self::Barrier)
    }

    fn run(&self, ctx: &Replica, x: &Tensor, axes: MeshAxes) -> Result<Tensor> {
        match self {
            Self::Psum => ctx.psum(x, axes),
            Self::Pmean => ctx.pmean(x, axes),
            Self::Pmax => ctx.pmax(x, axes),
            Self::Pmin => ctx.pmin(x, axes),
            Self::Pvary => ctx.pvary(x, axes),
            Self::AllGather(dim) => ctx.all_gather(x, *dim, axes),
            Self::PsumScatter(dim) => ctx.psum_scatter(x, *dim, axes),
            Self::Ppermute(pairs) => ctx.ppermute(x, pairs, axes),
            Self::AllToAll(split, concat) => ctx.all_to_all(x, *split, *concat, axes),
            Self::Broadcast(root) => ctx.broadcast(x, *root, axes),
            Self::Barrier => ctx.barrier(axes).map(|()| x.clone()),
        }
    }

    /// Returns the expected result of rank `rank`, given the arguments of its group.
    fn model(&self, passed: &[&Array], rank: usize, dtype: DType) -> Array {
        let (mine, size) = (passed[rank], passed.len());
        let fold = |combine: &dyn Fn(f64, f64) -> f64, finish: &dyn Fn(f64) -> f64| Array {
            shape: mine.shape.clone(),
            items: (0..mine.items.len())
                .map(|n: usize| {
                    finish(passed.iter().map(|array| array.items[n]).reduce(combine).unwrap())
                })
                .collect(),
        };
        let sum = || fold(&|sum, next| add(dtype, sum, next), &|sum| round(dtype, sum));
        match self {
            Self::Psum => sum(),
            Self::Pmean => fold(&|sum, next| add(dtype, sum, next), &|sum| mean(dtype, sum, size)),
            Self::Pmax => fold(&f64::max, &|x| x),
            Self::Pmin => fold(&f64::min, &|x| x),
            Self::Pvary | Self::Barrier => mine.clone(),
            Self::AllGather(dim) => gathered(passed, axis_of(*dim, mine.shape.len())),
            Self::PsumScatter(dim) => sum().part(axis_of(*dim, mine.shape.len()), rank, size),
            Self::Ppermute(pairs) => match pairs.iter().find(|(_, to)| *to == rank) {
                Some((from, _)) => passed[*from].clone(),
                None => Array::from_fn(&mine.shape, |_| 0.0),
            },
            Self::AllToAll(split, concat) => {
                let (split, concat) =
                    (axis_of(*split, mine.shape.len()), axis_of(*concat, mine.shape.len()));
                let parts: Vec<Array> =
                    passed.iter().map(|array| array.part(split, rank, size)).collect();
                gathered(&parts.iter().collect::<Vec<_>>(), concat)
            }
            Self::Broadcast(root) => passed[*root].clone(),
        }
    }
}

/// A tensor of the model: items in row-major order.
#[derive(Clone, Debug)]
struct Array {
    shape: Vec<usize>,
    items: Vec<f64>,
}

impl Array {
    fn from_fn(shape: &[usize], mut item: impl FnMut(&[usize]) -> f64) -> Self {
        let mut index = vec![0; shape.len()];
        let items = (0..shape.iter().product()).map(|n: usize| {
            let mut rest = n;
            for (dim, size) in shape.iter().enumerate().rev() {
                index[dim] = rest % size;
                rest /= size;
            }
            item(&index)
        });
        let items = items.collect();
        Self { shape: shape.to_vec(), items }
    }

    fn from_tensor(tensor: &Tensor) -> Self {
        let items = tensor.to_dtype(DType::F64).and_then(|tensor| tensor.flatten_all()?.to_vec1());
        Self { shape: tensor.dims().to_vec(), items: items.unwrap() }
    }

    fn tensor(&self, dtype: DType) -> Tensor {
        let tensor = Tensor::from_vec(self.items.clone(), self.shape.clone(), &Device::Cpu);
        tensor.and_then(|tensor| tensor.to_dtype(dtype)).unwrap()
    }

    fn item(&self, index: &[usize]) -> f64 {
        self.items
            [index.iter().zip(&self.shape).fold(0, |offset, (index, size)| offset * size + index)]
    }

    /// Returns part number `part` of `parts` equal ones.
    fn part(&self, dim: usize, part: usize, parts: usize) -> Self {
        let mut shape = self.shape.clone();
        shape[dim] /= parts;
        let start = part * shape[dim];
        Self::from_fn(&shape, |index| {
            let mut index = index.to_vec();
            index[dim] += start;
            self.item(&index)
        })
    }

    /// Returns true if both are equal to the bit.
    fn same(&self, other: &Self) -> bool {
        let bits = |array: &Self| array.items.iter().map(|item| item.to_bits()).collect::<Vec<_>>();
        self.shape == other.shape && bits(self) == bits(other)
    }
}

fn gathered(arrays: &[&Array], dim: usize) -> Array {
    let mut shape = arrays[0].shape.clone();
    shape[dim] = arrays.iter().map(|array| array.shape[dim]).sum();
    Array::from_fn(&shape, |index| {
        let (mut index, mut from) = (index.to_vec(), 0);
        while index[dim] >= arrays[from].shape[dim] {
            index[dim] -= arrays[from].shape[dim];
            from += 1;
        }
        arrays[from].item(&index)
    })
}

fn axis_of(dim: isize, rank: usize) -> usize {
    dim.rem_euclid(rank as isize) as usize
}

/// Returns the next partial sum, in the type of the sums of `dtype`.
fn add(dtype: DType, sum: f64, next: f64) -> f64 {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 => f64::from(sum as f32 + next as f32),
        DType::U8 => (sum + next) % 256.0,
        DType::U32 => (sum + next) % 4_294_967_296.0,
        _ => sum + next,
    }
}

fn mean(dtype: DType, sum: f64, count: usize) -> f64 {
    let mean =
        if dtype == DType::F64 { sum / count as f64 } else { f64::from(sum as f32 / count as f32) };
    round(dtype, mean)
}

fn round(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::BF16 => bf16::from_f32(x as f32).to_f64(),
        DType::F16 => f16::from_f32(x as f32).to_f64(),
        _ => x,
    }
}

/// A stream of numbers that depends only on its seed.
struct Random(Seed, u64);

impl Random {
    fn word(&mut self) -> u64 {
        self.1 += 1;
        self.0.derive(self.1).as_u64()
    }

    fn less_than(&mut self, end: usize) -> usize {
        (self.word() % end as u64) as usize
    }

    /// Returns a number from -1 to 1.
    fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    /// Returns a value of `dtype`: floats of many magnitudes, so that the order of a sum matters,
    /// and integers that wrap, where the model supports it.
    fn value(&mut self, dtype: DType) -> f64 {
        match dtype {
            DType::U8 => self.less_than(256) as f64,
            DType::U32 => self.less_than(1 << 32) as f64,
            DType::I64 => self.less_than(1 << 49) as f64 - (1_u64 << 48) as f64,
            _ => {
                let magnitude = 2_f64.powi(self.less_than(12) as i32 - 6);
                round(dtype, self.unit() * magnitude)
            }
        }
    }

    fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.less_than(choices.len())].clone()
    }

    fn step(&mut self, grid: &[usize]) -> Step {
        let set = self.pick(&subsets(grid.len()));
        let group = size_along(grid, &set);
        let dtype = self.pick(&DTYPES);
        let ops: Vec<Op> = every_op(group).into_iter().filter(|op| op.takes(dtype)).collect();
        let op = match self.pick(&ops) {
            Op::Ppermute(_) => Op::Ppermute(self.pairs(group)),
            Op::Broadcast(_) => Op::Broadcast(self.less_than(group)),
            other => other,
        };
        let [first, middle, last]: [usize; 3] = array::from_fn(|_| 1 + self.less_than(2));
        let shape = vec![first * group, middle, last * group];
        Step { op, set, dtype, shape, view: View::nth(self.word()), seed: self.word() }
    }

    /// Returns some pairs of a random permutation.
    fn pairs(&mut self, group: usize) -> Vec<(usize, usize)> {
        let mut to: Vec<usize> = (0..group).collect();
        (1..group).for_each(|n| to.swap(n, self.less_than(n + 1)));
        to.into_iter().enumerate().filter(|_| self.less_than(4) > 0).collect()
    }
}
