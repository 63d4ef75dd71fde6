//! Training on several devices is training on one, faster: the same losses, the same gradients.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::needless_pass_by_value, reason = "models are built of builders by value")]
#![allow(clippy::cast_possible_truncation, reason = "sizes are small")]

use candle_core::{DType, Device, Tensor};
use candle_nn::{
    AdamW, Linear, Module, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap, linear, loss::mse,
};
use core_types::Seed;
use dist_train::{DataParallel, Error, Group, value_and_grad};
use pmap_mesh::{DeviceMesh, Replica, ReplicaError, Uneven};

#[derive(Debug)]
struct Mlp(Linear, Linear);

impl Mlp {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self(linear(6, 16, vb.pp("up"))?, linear(16, 1, vb.pp("down"))?))
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> candle_core::Result<Tensor> {
        mse(&self.1.forward(&self.0.forward(x)?.tanh()?)?, y)
    }
}

type Batch = (Tensor, Tensor);

/// Numbers in [−1, 1) that depend on the seed alone.
fn noise(seed: u64, shape: (usize, usize)) -> Tensor {
    let unit = |n| (Seed::new(seed).derive(n).as_u64() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0;
    let values: Vec<f32> = (0..(shape.0 * shape.1) as u64).map(unit).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn batch(step: u64, rows: usize) -> Batch {
    let x = noise(100 + step, (rows, 6));
    let y = x.sqr().unwrap().sum_keepdim(1).unwrap();
    (x, y)
}

/// The same parameters every time.
fn vars() -> VarMap {
    let vars = VarMap::new();
    Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
    let mut named: Vec<_> =
        vars.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    named.sort_by(|left, right| left.0.cmp(&right.0));
    for (n, (_, var)) in (0..).zip(named) {
        let values = noise(n, (1, var.elem_count())).reshape(var.shape()).unwrap();
        var.set(&(values * 0.4).unwrap()).unwrap();
    }
    vars
}

fn adam(group: Group) -> candle_core::Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() })
}

type Trained = DataParallel<Mlp, AdamW>;

fn trained(slots: usize) -> Trained {
    DataParallel::builder(&DeviceMesh::cpu(slots).unwrap(), Mlp::new)
        .variables(&vars())
        .build(adam)
        .unwrap()
}

fn loss(_: &Replica, model: &Mlp, (x, y): Batch) -> candle_core::Result<Tensor> {
    model.loss(&x, &y)
}

fn scalar(loss: &Tensor) -> f32 {
    loss.to_scalar().unwrap()
}

/// Losses of plain candle on the same batches.
fn plain(steps: u64, rows: impl Fn(u64) -> usize) -> Vec<f32> {
    let vars = vars();
    let model = Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
    let params = ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(vars.all_vars(), params).unwrap();
    let step = |step| {
        let (x, y) = batch(step, rows(step));
        let loss = model.loss(&x, &y).unwrap();
        optimizer.backward_step(&loss).unwrap();
        scalar(&loss)
    };
    (0..steps).map(step).collect()
}

fn assert_close(left: &[f32], right: &[f32], tolerance: f32) {
    assert_eq!(left.len(), right.len());
    for (step, (left, right)) in left.iter().zip(right).enumerate() {
        assert!(
            (left - right).abs() <= tolerance * right.abs().max(0.01),
            "step {step}: {left} for {right}"
        );
    }
}

#[test]
fn the_loss_of_200_steps_is_that_of_one_device() {
    let expected = plain(200, |_| 12);
    assert!(expected[199] < expected[0] / 4.0);
    for slots in [1, 2, 4] {
        let mut model = trained(slots);
        let losses: Vec<f32> =
            (0..200).map(|step| model.step(batch(step, 12), loss).unwrap().loss as f32).collect();
        assert_close(&losses, &expected, 2e-3);
    }
}

#[test]
fn a_run_is_the_same_to_the_bit_every_time() {
    let run = || -> Vec<f32> {
        let mut model = trained(3);
        (0..20).map(|step| model.step(batch(step, 12), loss).unwrap().loss as f32).collect()
    };
    assert_eq!(run(), run());
}

#[test]
fn uneven_batches_train_as_whole_ones() {
    let rows = |step| 5 + step as usize % 4;
    let mut model = DataParallel::builder(&DeviceMesh::cpu(3).unwrap(), Mlp::new)
        .variables(&vars())
        .uneven(Uneven::Balanced)
        .build(adam)
        .unwrap();
    let losses: Vec<f32> = (0..40)
        .map(|step| model.step(batch(step, rows(step)), loss).unwrap().loss as f32)
        .collect();
    assert_close(&losses, &plain(40, rows), 1e-3);
}

#[test]
fn accumulated_batches_count_as_one() {
    let step = |batches: usize| {
        let vars = vars();
        let mut model = DataParallel::builder(&DeviceMesh::cpu(2).unwrap(), Mlp::new)
            .variables(&vars)
            .build(|group| SGD::new(group.vars, 0.1))
            .unwrap();
        let (x, y) = batch(0, 12);
        let part = |n: usize| {
            let rows = 12 / batches;
            (x.narrow(0, n * rows, rows).unwrap(), y.narrow(0, n * rows, rows).unwrap())
        };
        for n in 1..batches {
            model.accumulate(part(n), loss).unwrap();
        }
        model.step(part(0), loss).unwrap();
        let var = vars.data().lock().unwrap()["up.weight"].clone();
        var.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    assert_close(&step(3), &step(1), 1e-5);
}

#[test]
fn gradients_are_clipped_by_their_norm_over_all_parameters() {
    for replicated in [false, true] {
        let vars = vars();
        let before: Vec<Tensor> =
            vars.all_vars().iter().map(|var| var.copy().unwrap().detach()).collect();
        let mesh = DeviceMesh::cpu(2).unwrap();
        let builder = DataParallel::builder(&mesh, Mlp::new).variables(&vars).clip_grad_norm(0.05);
        let builder = if replicated { builder.replicated() } else { builder };
        let mut model = builder.build(|group| SGD::new(group.vars, 1.0)).unwrap();
        model.step(batch(0, 8), loss).unwrap();
        let moved = before.iter().zip(vars.all_vars()).map(|(before, after)| {
            (before - after.as_tensor())
                .unwrap()
                .sqr()
                .unwrap()
                .sum_all()
                .unwrap()
                .to_scalar::<f32>()
                .unwrap()
        });
        let norm = moved.sum::<f32>().sqrt();
        assert!((norm - 0.05).abs() < 1e-4, "a step of length {norm}");
    }
}

#[test]
fn replicas_with_variables_of_their_own_stay_in_sync_until_one_is_changed() {
    let (mesh, vars) = (DeviceMesh::cpu(3).unwrap(), vars());
    let builder = DataParallel::builder(&mesh, Mlp::new).variables(&vars).replicated();
    let mut model: Trained = builder.build(adam).unwrap();
    let losses: Vec<f32> =
        (0..30).map(|step| model.step(batch(step, 12), loss).unwrap().loss as f32).collect();
    assert_close(&losses, &plain(30, |_| 12), 1e-3);
    model.check_in_sync().unwrap();
    let var = vars.data().lock().unwrap()["down.bias"].clone();
    var.set(&(var.as_tensor() * 1.5).unwrap()).unwrap();
    let error = model.check_in_sync().unwrap_err();
    assert!(matches!(error, Error::Diverged { name, replica: 1 } if name == "down.bias"));
}

#[test]
fn a_failed_step_changes_nothing_and_the_next_one_works() {
    let mut model = trained(2);
    let expected = plain(1, |_| 12);
    let failed = model.step(batch(0, 12), |ctx, model, (x, y): Batch| match ctx.slot() {
        1 => candle_core::bail!("no data"),
        _ => model.loss(&x, &y),
    });
    assert!(matches!(
        failed,
        Err(Error::Mesh(pmap_mesh::Error::Replica(ReplicaError::Failed { slot: 1, .. })))
    ));
    assert_close(&[model.step(batch(0, 12), loss).unwrap().loss as f32], &expected, 1e-5);
}

#[test]
fn gradients_of_a_mesh_are_those_of_one_device() {
    let vars = vars();
    let model = || Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
    let (x, y) = batch(0, 10);
    let serial = model().loss(&x, &y).unwrap();
    let expected = serial.backward().unwrap();
    for (slots, uneven) in
        [(1, Uneven::Refuse), (2, Uneven::Refuse), (5, Uneven::Refuse), (4, Uneven::Balanced)]
    {
        let (mesh, model) = (DeviceMesh::cpu(slots).unwrap(), model());
        let step =
            value_and_grad(&mesh, vars.all_vars(), move |_, (x, y): Batch| model.loss(&x, &y));
        let (loss, grads) = step.uneven(uneven).call((x.clone(), y.clone())).unwrap();
        assert_close(&[loss as f32], &[scalar(&serial)], 1e-5);
        for var in vars.all_vars() {
            let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_close(
                &values(grads.get(&var).unwrap()),
                &values(expected.get(&var).unwrap()),
                1e-3,
            );
        }
    }
}

#[test]
fn the_gradients_of_a_clipped_step_have_the_norm_of_their_mean() {
    // Accumulated batches and uneven shards: what is clipped is the mean that a plain step has.
    let step = |max_norm: Option<f64>| {
        let vars = vars();
        let mesh = DeviceMesh::cpu(3).unwrap();
        let mut builder =
            DataParallel::builder(&mesh, Mlp::new).variables(&vars).uneven(Uneven::Balanced);
        if let Some(max_norm) = max_norm {
            builder = builder.clip_grad_norm(max_norm);
        }
        let mut model = builder.build(|group| SGD::new(group.vars, 1.0)).unwrap();
        let before: Vec<Tensor> =
            vars.all_vars().iter().map(|var| var.copy().unwrap().detach()).collect();
        model.accumulate(batch(0, 7), loss).unwrap();
        model.step(batch(1, 7), loss).unwrap();
        let squares = before.iter().zip(vars.all_vars()).map(|(before, after)| {
            let moved = (before - after.as_tensor()).unwrap();
            moved.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap()
        });
        f64::from(squares.sum::<f32>().sqrt())
    };
    let norm = step(None);
    assert!((step(Some(norm * 2.0)) - norm).abs() < norm * 1e-5, "a large limit changes nothing");
    assert!((step(Some(norm / 2.0)) - norm / 2.0).abs() < norm * 1e-4);
}

#[test]
fn models_that_cannot_be_built_are_errors() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let build = |_: VarBuilder<'_>| -> candle_core::Result<Mlp> { candle_core::bail!("no layers") };
    let error = DataParallel::builder(&mesh, build).build(adam).unwrap_err();
    assert!(matches!(error, Error::Model { .. }));
    assert_eq!(error.to_string(), "the model cannot be built: no layers");

    let no_optimizer = |_: Group| -> candle_core::Result<AdamW> { candle_core::bail!("no\n rate") };
    let error = DataParallel::builder(&mesh, Mlp::new).build(no_optimizer).unwrap_err();
    assert_eq!(error.to_string(), "the model cannot be built: no rate");
}

#[test]
fn a_panic_in_a_loss_ends_the_step_and_not_the_training() {
    let mut model = trained(2);
    let failed = model.step(batch(0, 12), |ctx, model: &Mlp, (x, y): Batch| {
        assert!(ctx.slot() != 1, "a broken loss");
        model.loss(&x, &y)
    });
    assert!(matches!(failed, Err(Error::Mesh(_))));
    assert_close(&[model.step(batch(0, 12), loss).unwrap().loss as f32], &plain(1, |_| 12), 1e-5);
}
