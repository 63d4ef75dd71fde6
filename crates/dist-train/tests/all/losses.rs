//! Weighted losses: loss, norm and update match one device for every distribution of rows.

use std::{
    iter,
    sync::{Mutex, mpsc},
    time::Duration,
};

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Linear, Module, Optimizer, SGD, linear, linear_no_bias, loss::mse};
use dist_train::{
    DataParallel, DistributedModel, Error, Loss, ParamsSgd, Sgd, TrainingError, Units,
    value_and_grad,
};
use pmap_mesh::{ALL, DeviceMesh, P, Replica, ReplicaError, Uneven};

use crate::support::{LAYOUTS, bits, input, layer, refused, replicated};

/// The time limit of a call.
const DEADLINE: Duration = Duration::from_millis(20);

const RATE: f64 = 0.1;

#[test]
fn bf16_gradients_pass_through_collectives() {
    // The loss of the first three rows depends on the parameter only through the last two, which
    // are on slots with other row counts.
    let x = [[1_f32, 0.], [1., 0.], [1., 0.], [0., 1.], [0., 1.]];
    let x = Tensor::new(&x, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
    let w = Var::ones((1, 1), DType::BF16, &Device::Cpu).unwrap();
    for (slots, uneven) in [(2, Uneven::Balanced), (3, Uneven::Balanced), (4, Uneven::Pad)] {
        let in_loss = w.clone();
        let mesh = DeviceMesh::cpu(slots).unwrap();
        // The mean of the first column, times the sum of the second column times the parameter.
        // Padding consists of zeros, which do not change the sum; the last of 4 slots has only
        // padding.
        let step = value_and_grad(&mesh, vec![w.clone()], move |ctx, x: Tensor| {
            let here = x.narrow(1, 1, 1)?.contiguous()?.matmul(&in_loss)?.sum_all()?;
            let all = ctx.pvary(&ctx.psum(&here, ALL)?, ALL)?;
            let rows = ctx.valid_len().unwrap().max(1) as f64;
            Ok(Loss::mean((x.narrow(1, 0, 1)?.broadcast_mul(&all)?.sum_all()? / rows)?))
        });
        let (_, grads) = step.uneven(uneven).call(x.clone()).unwrap();
        let found = grads.get(&w).unwrap().to_vec2::<f32>().unwrap()[0][0];
        assert!((found / 1.2 - 1.0).abs() < 0.02, "{found} for 1.2 on {slots} slots");
    }
}

#[test]
fn attached_rows_of_all_slots_and_batches_are_joined() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let loss = |_: &Replica, model: &Units, x: Tensor| {
        let y = model.unit("0", &x, layer)?;
        Ok(Loss::mean(y.sqr()?.mean_all()?).with_rows((x, y)))
    };
    for (layout, uneven) in iter::zip(LAYOUTS, [Uneven::Pad, Uneven::Balanced]) {
        let builder = layout(replicated(&mesh)).uneven(uneven).allow_unused(["1", "2"]);
        let mut model = builder.build(|group| SGD::new(group.vars, RATE)).unwrap();
        // By `Pad`, the slots have 2, 2 and 0 of 4 rows.
        for _ in 0..2 {
            let (x, y) = model.evaluate(input(4), loss).unwrap().aux;
            assert_eq!((bits(&x), y.dims()), (bits(&input(4)), &[4, 3][..]));
        }
        let (x, _) = model.accumulate(input(5), loss).unwrap().aux;
        assert_eq!(bits(&x), bits(&input(5)));
        let (x, _) = model.step(input(4), loss).unwrap().aux;
        assert_eq!(bits(&x), [bits(&input(5)), bits(&input(4))].concat());

        let mean = |_: &Replica, model: &Units, x: Tensor| {
            let y = model.unit("0", &x, layer)?.sqr()?.mean_all()?;
            Ok(Loss::mean(y.clone()).with_rows(y))
        };
        let error = refused(model.evaluate(input(6), mean));
        assert_eq!(error, TrainingError::AttachedRows { shape: vec![], n_rows: 2 });
    }
}

#[test]
fn rows_that_slots_share_are_joined_once() {
    let mesh = DeviceMesh::builder().axis("data", 2).axis("model", 2).cpu().unwrap();
    let joined = |in_axes: P| {
        let builder = DataParallel::builder(&mesh, |vb| linear(3, 1, vb)).in_axes(in_axes);
        let mut model = builder.build(|group| SGD::new(group.vars, RATE)).unwrap();
        model.evaluate(input(8), |_: &Replica, model: &Linear, x: Tensor| {
            Ok(Loss::mean(model.forward(&x)?.mean_all()?).with_rows(x))
        })
    };
    for axis in ["data", "model"] {
        assert_eq!(bits(&joined(P::shard(0, axis)).unwrap().aux), bits(&input(8)));
    }
    let crossed = P::shard(0, "model").and(P::shard(0, "data"));
    for (in_axes, reason) in [(P::replicate(), "is cut"), (crossed, "earlier rows")] {
        let error = refused(joined(in_axes));
        assert!(matches!(&error, TrainingError::Option { option: "in_axes", .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}

fn simple() -> DistributedModel<Linear, SGD> {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = DataParallel::builder(&mesh, |vb| linear(3, 1, vb));
    builder.build(|group| SGD::new(group.vars, RATE)).unwrap()
}

fn pair() -> (Tensor, Tensor) {
    let x = Tensor::arange(0_f32, 12., &Device::Cpu).unwrap().reshape((4, 3)).unwrap();
    (x.clone(), x.sum_keepdim(1).unwrap())
}

/// Returns a loss with one weight per row, which is not a scalar.
fn row_weighted(_: &Replica, model: &Linear, (x, y): (Tensor, Tensor)) -> Result<Loss> {
    Ok(Loss::sum(mse(&model.forward(&x)?, &y)?, y.ones_like()?))
}

fn not_scalar(what: &'static str, shape: &[usize], dtype: &str) -> TrainingError {
    TrainingError::NotScalar { slot: 0, what, shape: shape.to_vec(), dtype: dtype.to_owned() }
}

#[test]
fn invalid_losses_are_rejected() {
    let mut model = simple();
    assert_eq!(
        refused(model.step(pair(), |_: &Replica, _: &Linear, _| Tensor::new(0_u32, &Device::Cpu))),
        not_scalar("loss", &[], "u32")
    );
    assert_eq!(
        refused(model.step(pair(), |_, model, (x, _)| model.forward(&x))),
        not_scalar("loss", &[2, 1], "f32")
    );
    let weighing = |weight: f64| {
        move |_: &Replica, model: &Linear, (x, y): (Tensor, Tensor)| {
            Ok(Loss::sum(mse(&model.forward(&x)?, &y)?, weight))
        }
    };
    let shape = not_scalar("weight of the loss", &[2, 1], "f32");
    assert_eq!(refused(model.step(pair(), row_weighted)), shape);
    assert_eq!(refused(model.step(pair(), weighing(0.0))), TrainingError::NoWeight);
    let negative = TrainingError::Weight { slot: 0, weight: -1.0 };
    assert_eq!(refused(model.step(pair(), weighing(-1.0))), negative);
    assert_eq!(refused(model.evaluate(pair(), weighing(-1.0))), negative);
    assert!(matches!(
        refused(model.accumulate(pair(), weighing(f64::INFINITY))),
        TrainingError::Weight { slot: 0, .. }
    ));
    model.step(pair(), weighing(3.0)).unwrap();
}

#[test]
fn weightless_shards_do_not_count() {
    let mut model = simple();
    let (x, y) = pair();
    let half = (x.narrow(0, 0, 2).unwrap(), y.narrow(0, 0, 2).unwrap());
    let expected = model
        .evaluate(
            (half.0.repeat((2, 1)).unwrap(), half.1.repeat((2, 1)).unwrap()),
            |_, model, (x, y)| mse(&model.forward(&x)?, &y),
        )
        .unwrap();
    // Slot 1 has no weight, and its loss is NaN.
    let step = model.step((x, y), |ctx: &Replica, model: &Linear, (x, y)| {
        let loss = mse(&model.forward(&x)?, &y)?;
        let slot = ctx.slot() as f64;
        Ok(Loss::sum((loss / (1.0 - slot))?, 2.0 * (1.0 - slot)))
    });
    let step = step.unwrap();
    assert!((step.loss * 2.0 - expected.loss).abs() < 1e-4 * expected.loss);
    assert!(step.grad_norm.is_finite());
    assert!((step.weight - 2.0).abs() < 1e-12);
}

#[test]
fn weightless_batches_add_nothing() {
    let weighing = |weight: f64| {
        move |_: &Replica, model: &Linear, (x, y): (Tensor, Tensor)| {
            let mean = mse(&model.forward(&x)?, &y)?;
            // Without a weight, NaN is allowed.
            Ok(Loss::sum((mean * (weight / weight))?, weight))
        }
    };
    let trained = |weights: &[f64]| {
        let mut model = simple();
        let (last, before) = weights.split_last().unwrap();
        for &weight in before {
            let added = model.accumulate(pair(), weighing(weight)).unwrap();
            assert_eq!(added.loss.is_nan(), weight == 0.0);
        }
        let step = model.step(pair(), weighing(*last)).unwrap();
        let items =
            model.parameters().unwrap()["weight"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let items: Vec<u32> = items.into_iter().map(f32::to_bits).collect();
        (step.loss.to_bits(), step.grad_norm.to_bits(), step.weight.to_bits(), items)
    };
    let expected = trained(&[3.0, 2.0]);
    for weights in [&[0.0, 3.0, 2.0][..], &[3.0, 0.0, 2.0], &[3.0, 2.0, 0.0], &[0.0, 0.0, 3.0, 2.0]]
    {
        assert_eq!(trained(weights), expected, "{weights:?}");
    }
    let mut model = simple();
    model.accumulate(pair(), weighing(0.0)).unwrap();
    let shape = not_scalar("weight of the loss", &[2, 1], "f32");
    assert_eq!(refused(model.step(pair(), row_weighted)), shape);
    assert_eq!(refused(model.step(pair(), weighing(0.0))), TrainingError::NoWeight);
    assert_eq!(refused(model.evaluate(pair(), weighing(0.0))), TrainingError::NoWeight);
}

#[test]
fn loss_errors_show_batch_shapes() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let loss = |_: &Replica, model: &Linear, (x, y): (Tensor, Tensor)| mse(&model.forward(&x)?, &y);
    let mut model = DataParallel::builder(&mesh, |vb| linear(3, 1, vb))
        .in_axes([Some(0), None])
        .build(|group| SGD::new(group.vars, RATE))
        .unwrap();
    let error = model.step(pair(), loss).unwrap_err().to_string();
    assert!(
        error.contains(
            "the loss of a shard, of tensors [4, 3] cut to [2, 3], [4, 1] whole: shape mismatch"
        ),
        "{error}"
    );
    let product = value_and_grad(&mesh, vec![], |_, (x, y): (Tensor, Tensor)| x.matmul(&y));
    let error = product.call(pair()).unwrap_err().to_string();
    assert!(
        error.contains("[4, 3] cut to [2, 3], [4, 1] cut to [2, 1]: shape mismatch"),
        "{error}"
    );
    // All tensors are split by default.
    simple().step(pair(), loss).unwrap();
}

#[test]
fn stuck_replica_names_the_call() {
    let mesh = DeviceMesh::builder().axis(DeviceMesh::AXIS, 2).deadline(DEADLINE).cpu().unwrap();
    let (open, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let mean = value_and_grad(&mesh, vec![], move |ctx, x: Tensor| {
        if ctx.slot() == 1 {
            // Waits until the test drops the sender.
            gate.lock().unwrap().recv().unwrap_err();
        }
        x.mean_all()
    });
    let ones = Tensor::ones(2, DType::F32, &Device::Cpu).unwrap();
    let line = line!() + 1;
    mean.call(ones.clone()).unwrap_err();
    let error = mean.call(ones).unwrap_err();
    drop(open);
    let Error::Mesh(pmap_mesh::Error::Replica(ReplicaError::Stuck { slot: 1, call })) = error
    else {
        panic!("{error}")
    };
    assert_eq!((call.file(), call.line()), (file!(), line));
}

/// Returns a weight after one step of gradient descent from `start`, with one gradient per slot.
fn descended(dtype: DType, start: f32, grads: &[f32], lr: f64) -> f32 {
    let mesh = DeviceMesh::cpu(grads.len()).unwrap();
    let mut model = DataParallel::builder(&mesh, |vb| linear_no_bias(1, 1, vb))
        .dtype(dtype)
        .init_with(move |_, _| Tensor::new(&[start], &Device::Cpu)?.to_dtype(dtype))
        .build(|group| Sgd::new(group.vars, ParamsSgd { lr, ..ParamsSgd::default() }))
        .unwrap();
    let slots = grads.len() as f64;
    let x = Tensor::new(grads, &Device::Cpu).unwrap().reshape((grads.len(), 1)).unwrap();
    let step = model.step(x.to_dtype(dtype).unwrap(), |_: &Replica, model: &Linear, x| {
        Ok(Loss::sum(model.forward(&x)?.sum_all()?, 1.0 / slots))
    });
    step.unwrap();
    let weight = model.parameter("weight").unwrap().to_dtype(DType::F32).unwrap();
    weight.to_vec2::<f32>().unwrap()[0][0]
}

#[test]
#[expect(clippy::float_cmp, reason = "all of these numbers are exact")]
fn optimizer_gets_unrounded_sums() {
    // bf16 represents 262, 264 and 256 − 263, but not 263.
    assert_eq!(descended(DType::BF16, 256.0, &[256., 1., 1., 1., 1., 1., 1., 1.], 1.0), -7.0);
    // Each gradient fits f16, but the sum 7 · 2^14 overflows it.
    assert_eq!(descended(DType::F16, 0.0, &[57344., 57344.], 0.5_f64.powi(14)), -7.0);
}

#[test]
fn absent_gradients_are_not_stored() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let vars: Vec<Var> = (0..3).map(|_| Var::ones(1, DType::F64, &Device::Cpu).unwrap()).collect();
    let in_loss = vars.clone();
    // Only slot 1 uses the second variable.
    let step = value_and_grad(&mesh, vars.clone(), move |ctx, x: Tensor| {
        let all = x.broadcast_mul(&in_loss[0])?;
        if ctx.slot() == 1 { all.broadcast_mul(&in_loss[1])?.mean_all() } else { all.mean_all() }
    });
    let (loss, grads) = step.call(Tensor::ones(4, DType::F64, &Device::Cpu).unwrap()).unwrap();
    assert!((loss - 1.0).abs() < 1e-10, "{loss}");
    let gradient = |n: usize| grads.get(&vars[n]).map(|grad| grad.to_vec1::<f64>().unwrap());
    assert_eq!((gradient(0), gradient(1), gradient(2)), (Some(vec![1.0]), Some(vec![0.5]), None));
}
