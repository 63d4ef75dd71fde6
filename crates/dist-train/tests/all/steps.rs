//! Steps: rejected losses, failures, random numbers and evaluations.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, Optimizer, SGD, VarBuilder, linear, linear_no_bias};
use core_types::Seed;
use dist_train::{
    DataParallel, DistributedModel, Error, Keep, Loss, ModelBuilder, ParamsSgd, Sgd, TrainingError,
    UnitRules, Units,
};
use fsdp_plan::strategy::{Choice, Hybrid};
use pmap_mesh::{DeviceMesh, Replica, ReplicaError, Uneven};

use crate::support::{refused, refused_option, saved};

type Model = DistributedModel<Linear, SGD>;

fn model(slots: usize) -> Model {
    seeded(slots, 1)
}

fn seeded(slots: usize, seed: u64) -> Model {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    DataParallel::builder(&mesh, |vb: VarBuilder<'_>| linear(3, 1, vb))
        .uneven(Uneven::Pad)
        .seed(Seed::new(seed))
        .build(|group| SGD::new(group.vars, 0.01))
        .unwrap()
}

fn input(rows: usize) -> Tensor {
    Tensor::ones((rows, 3), DType::F32, &Device::Cpu).unwrap()
}

fn weight(model: &Model) -> Vec<f32> {
    model.parameters().unwrap()["weight"].flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn nan_loss_prevents_the_update() {
    let mut trained = model(3);
    let before = weight(&trained);
    let loss = |ctx: &Replica, model: &Linear, x: Tensor| {
        let scale = if ctx.slot() == 1 { f64::NAN } else { 1.0 };
        model.forward(&x)?.mean_all()? * scale
    };
    let error = refused(trained.step(input(6), loss));
    assert!(
        matches!(error, TrainingError::NonFiniteLoss { slot: 1, value } if value.is_nan()),
        "{error}"
    );
    assert_eq!(error.to_string(), "the loss of slot 1 is NaN");
    assert_eq!(weight(&trained), before);
    refused(trained.accumulate(input(6), loss));
    refused(trained.evaluate(input(6), loss));

    let mesh = DeviceMesh::cpu(3).unwrap();
    let mut allowing = DataParallel::builder(&mesh, |vb| linear(3, 1, vb))
        .allow_non_finite()
        .build(|group| SGD::new(group.vars, 0.01))
        .unwrap();
    let step = allowing.step(input(6), loss).unwrap();
    assert!(step.loss.is_nan() && step.grad_norm.is_nan());
}

#[test]
fn nan_gradients_are_named() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = DataParallel::builder(&mesh, |vb: VarBuilder<'_>| {
        Ok((linear_no_bias(3, 1, vb.pp("a"))?, linear_no_bias(3, 1, vb.pp("b"))?))
    });
    let mut model = builder.build(|group| SGD::new(group.vars, 0.01)).unwrap();
    // The root has no finite slope at 0.
    let error = refused(model.step(input(4), |ctx: &Replica, (a, b): &(Linear, Linear), x| {
        let x = if ctx.slot() == 1 { x.zeros_like()? } else { x };
        a.forward(&x)?.mean_all()? + b.forward(&x)?.abs()?.sqrt()?.mean_all()?
    }));
    assert_eq!(
        error.to_string(),
        "the norm of the gradients is NaN, the gradient of b.weight is the first that is not finite"
    );
}

/// Fails a step on slot 1, and checks that later steps match a model without the failure.
#[track_caller]
fn check_failed(fails: impl Fn() -> Result<()> + Sync) -> Error {
    let (mut expected, mut found) = (model(2), model(2));
    let loss = |_: &Replica, model: &Linear, x: Tensor| model.forward(&x)?.sqr()?.mean_all();
    let failed = found.step(input(4), |ctx: &Replica, model: &Linear, x| {
        if ctx.slot() == 1 {
            fails()?;
        }
        loss(ctx, model, x)
    });
    let error = failed.unwrap_err();
    for _ in 0..2 {
        let expected = expected.step(input(4), loss).unwrap().loss;
        assert_eq!(found.step(input(4), loss).unwrap().loss.to_bits(), expected.to_bits());
    }
    error
}

#[test]
fn failed_step_changes_nothing() {
    let error = check_failed(|| candle_core::bail!("no data"));
    let is_original = matches!(
        error,
        Error::Mesh(pmap_mesh::Error::Replica(ReplicaError::Failed { slot: 1, .. }))
    );
    assert!(is_original, "{error}");
}

#[test]
fn panicking_loss_ends_only_the_step() {
    let error = check_failed(|| panic!("a broken loss"));
    assert!(matches!(error, Error::Mesh(_)), "{error}");
}

#[test]
fn constructor_errors_are_returned() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder =
        DataParallel::builder(&mesh, |_| -> Result<Linear> { candle_core::bail!("no layers") });
    let error = builder.build(|group| SGD::new(group.vars, 0.1)).unwrap_err();
    assert!(matches!(error, Error::Model { .. }));
    assert_eq!(error.to_string(), "the model cannot be built: no layers");

    let builder = DataParallel::builder(&mesh, |vb| linear(3, 1, vb));
    let error = builder.build(|_| -> Result<SGD> { candle_core::bail!("no\n rate") });
    assert_eq!(error.unwrap_err().to_string(), "the model cannot be built: no rate");
}

/// Random masks of a step or evaluation, by slot.
type Drawn = Arc<Mutex<Vec<(usize, Vec<f32>)>>>;

fn drawing(drawn: &Drawn) -> impl Fn(&Replica, &Linear, Tensor) -> Result<Tensor> + use<> {
    let drawn = Arc::clone(drawn);
    move |ctx, model, x| {
        let noise = ctx.rng().uniform(4)?;
        drawn.lock().unwrap().push((ctx.slot(), noise.to_vec1()?));
        model.forward(&x)?.sqr()?.mean_all()
    }
}

/// Takes the numbers drawn since the last call, by slot.
fn taken(drawn: &Drawn) -> Vec<Vec<f32>> {
    let mut drawn = std::mem::take(&mut *drawn.lock().unwrap());
    drawn.sort_by_key(|(slot, _)| *slot);
    drawn.into_iter().map(|(_, noise)| noise).collect()
}

#[test]
fn resumed_runs_draw_the_same_numbers() {
    let drawn = Drawn::default();
    let run = |model: &mut Model, batches: usize| -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        for _ in 0..batches {
            model.step(input(4), drawing(&drawn)).unwrap();
            all.extend(taken(&drawn));
        }
        all
    };
    let mut first = model(2);
    let all = run(&mut first, 6);
    let mut distinct = Vec::new();
    for noise in &all {
        distinct.push(noise.iter().map(|x| x.to_bits()).collect::<Vec<u32>>());
    }
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), 12, "each batch and slot draws different numbers");

    let mut again = model(2);
    assert_eq!(run(&mut again, 3), all[..6]);
    // Evaluations and failed steps draw from other streams and do not change later steps.
    again.evaluate(input(4), drawing(&drawn)).unwrap();
    let evaluated = taken(&drawn);
    again.evaluate(input(4), drawing(&drawn)).unwrap();
    assert_eq!(taken(&drawn), evaluated);
    assert!(evaluated.iter().all(|noise| !all.contains(noise)));
    again
        .step(input(4), |_: &Replica, _: &Linear, _| -> Result<Tensor> {
            candle_core::bail!("no data")
        })
        .unwrap_err();

    again.set_learning_rate(0.123).unwrap();
    // The checkpoint overrides the seed.
    let mut resumed = seeded(2, 77);
    resumed.load(&saved(&DeviceMesh::cpu(2).unwrap(), &again)).unwrap();
    assert_eq!(resumed.steps(), 3);
    assert_eq!(run(&mut resumed, 3), all[6..]);
    assert_ne!(run(&mut seeded(2, 77), 3), all[..6]);
    // The checkpoint also contains the learning rate.
    assert_eq!(run(&mut again, 3), all[6..]);
    assert_eq!(weight(&resumed), weight(&again));
}

#[test]
fn accumulated_batches_draw_different_numbers() {
    let drawn = Drawn::default();
    let mut trained = model(1);
    trained.accumulate(input(4), drawing(&drawn)).unwrap();
    trained.step(input(4), drawing(&drawn)).unwrap();
    let noise = taken(&drawn);
    assert_ne!(noise[0], noise[1]);
    assert_eq!(trained.steps(), 1);
}

#[test]
fn evaluation_records_no_graph() {
    for slots in [1, 2, 4] {
        let mut trained = model(slots);
        let x = Tensor::arange(0_f32, 15., &Device::Cpu).unwrap().reshape((5, 3)).unwrap();
        let x = (x / 15.0).unwrap();
        let found = trained.evaluate(x.clone(), |ctx: &Replica, model: &Linear, x| {
            let x = x.narrow(0, 0, ctx.valid_len().unwrap())?;
            let y = model.forward(&x)?;
            assert!(!y.track_op(), "an evaluation records no operations");
            let positive = y.gt(-1e9)?.to_dtype(DType::F32)?.sum_all()?;
            Ok(Loss::mean(y.mean_all()?).with_sums(positive))
        });
        let found = found.unwrap();
        let [weight, bias] = ["weight", "bias"].map(|name| trained.parameter(name).unwrap());
        let expected = Linear::new(weight, Some(bias)).forward(&x).unwrap().mean_all().unwrap();
        let expected = f64::from(expected.to_scalar::<f32>().unwrap());
        assert!((found.loss - expected).abs() < 1e-5 * expected.abs().max(1.0), "{slots} slots");
        assert!((found.weight - 5.0).abs() < 1e-12);
        assert!((found.aux.to_scalar::<f32>().unwrap() - 5.0).abs() < 1e-6);

        // Evaluation uses the updated parameters.
        let train = |ctx: &Replica, model: &Linear, x: Tensor| {
            model.forward(&x.narrow(0, 0, ctx.valid_len().unwrap())?)?.sqr()?.mean_all()
        };
        let first = trained.step(x.clone(), train).unwrap().loss;
        assert!(trained.evaluate(x, train).unwrap().loss < first);
    }
}

#[test]
fn changed_aux_forms_are_rejected() {
    let mut trained = model(2);
    let loss = |_: &Replica, model: &Linear, x: Tensor| model.forward(&x)?.mean_all();
    trained.accumulate(input(4), loss).unwrap();
    let with_two = trained.step(input(4), |_: &Replica, model: &Linear, x| {
        let mean = model.forward(&x)?.mean_all()?;
        Ok(Loss::mean(mean.clone()).with_sums((mean.clone(), mean)))
    });
    let error = with_two.unwrap_err().to_string();
    assert!(error.contains("2 tensors are attached to the loss (Sum), 0 were"), "{error}");
    // Accumulated gradients are discarded.
    assert!((trained.step(input(4), loss).unwrap().weight - 4.0).abs() < 1e-12);
}

#[test]
fn diverged_parameters_are_found() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let copies = Hybrid::default().with_rule("**", Choice::Replicate).unwrap();
    let builder =
        || DataParallel::builder(&mesh, |vb| linear(3, 1, vb.pp(0))).by_units(UnitRules::new());
    for builder in [builder().replicated(), builder().fully_shard().strategy(copies)] {
        // Only the second slot decays its weights.
        let n_made = AtomicUsize::new(0);
        let mut model = builder
            .build(|group| {
                let weight_decay = 0.1 * n_made.fetch_add(1, Ordering::Relaxed) as f64;
                Sgd::new(group.vars, ParamsSgd { lr: 0.01, weight_decay, ..ParamsSgd::default() })
            })
            .unwrap();
        let loss = |_: &Replica, model: &Units, x: Tensor| {
            model.unit("0", &x, |vb, x| linear(3, 1, vb)?.forward(x))?.sqr()?.mean_all()
        };
        model.check_in_sync().unwrap();
        model.step(input(4), loss).unwrap();
        model.step(input(4), loss).unwrap();
        let is_bias = |error: Error| matches!(error, Error::Diverged { name, replica: 1 } if name == "0.bias");
        assert!(is_bias(model.check_in_sync().unwrap_err()));
        assert!(is_bias(model.state_dict().unwrap_err()));
    }
}

#[test]
fn options_of_other_layouts_are_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder =
        || DataParallel::builder(&mesh, |vb| linear(3, 1, vb.pp(0))).by_units(UnitRules::new());
    let rejected = |builder: ModelBuilder<'_, Units>| {
        refused_option(builder.build(|group| SGD::new(group.vars, 0.1))).0
    };
    assert_eq!(rejected(builder().keep(Keep::Graph)), "keep");
    assert_eq!(rejected(builder().prefetch(1)), "prefetch");
    assert_eq!(rejected(builder().optimizer_in_backward()), "optimizer_in_backward");
    assert_eq!(rejected(builder().fully_shard().replicated()), "replicated");
}
