//! Optimizers inside the backward pass: bitwise equality and failed steps.

use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, linear};
use dist_train::{Accumulation, DistributedModel, FullyShard, Group, TrainingError, Units};
use pmap_mesh::{DeviceMesh, Replica};

use super::model::{adam, batch, loss, sharded};
use crate::support::{
    assert_same, input, layer, layers, refused, refused_option, replicated, saved,
};

#[test]
fn gradient_norm_is_unchanged() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let mut expected = sharded(&mesh).build(adam).unwrap();
    let mut found = sharded(&mesh).optimizer_in_backward().build(adam).unwrap();
    for step in 0..3 {
        let expected = expected.step(batch(3, step), loss).unwrap().grad_norm;
        assert_eq!(
            found.step(batch(3, step), loss).unwrap().grad_norm.to_bits(),
            expected.to_bits()
        );
    }
}

/// Creates candle's optimizer, which counts steps once for all its variables.
fn candles_adam(group: Group) -> Result<candle_nn::AdamW> {
    let params = ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() };
    candle_nn::AdamW::new(group.vars, params)
}

fn values<O: Optimizer>(model: &DistributedModel<Units, O>) -> Vec<Vec<f32>> {
    let weights = (0..3).map(|layer| model.parameter(&format!("{layer}.weight")).unwrap());
    weights.map(|weight| weight.flatten_all().unwrap().to_vec1().unwrap()).collect()
}

/// Returns a loss that runs the layers in order, and skips the second if `step` is odd.
fn alternating(step: usize) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> + Send + Sync {
    move |_, model, x| {
        let units = if step.is_multiple_of(2) { &["0", "1", "2"][..] } else { &["0", "2"] };
        units.iter().try_fold(x, |x, unit| model.unit(unit, &x, layer))?.sqr()?.mean_all()
    }
}

#[test]
fn every_optimizer_counts_every_step() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for is_in_backward in [false, true] {
        // The group of the second layer has no gradient in odd steps.
        let mut whole = replicated(&mesh)
            .group("bias", ["**.bias"])
            .group("second", ["1.weight"])
            .build(candles_adam)
            .unwrap();
        whole.set_group_learning_rate("bias", 0.1).unwrap();
        let builder = FullyShard::builder(&mesh, layers::<3>).group("bias", ["**.bias"]);
        let builder = builder.group("second", ["1.weight"]);
        let builder = if is_in_backward { builder.optimizer_in_backward() } else { builder };
        let mut model = builder.build(candles_adam).unwrap();
        model.set_group_learning_rate("bias", 0.1).unwrap();
        for step in 0..7 {
            let expected = whole.step(input(6), alternating(step)).unwrap().loss;
            let found = model.step(input(6), alternating(step)).unwrap().loss;
            assert_eq!(found.to_bits(), expected.to_bits(), "step {step}, {is_in_backward}");
        }
        assert_same(&model, &whole);
    }
}

#[test]
fn clipping_and_accumulation_are_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = || FullyShard::builder(&mesh, layers::<3>).optimizer_in_backward();
    assert_eq!(refused_option(builder().clip_grad_norm(1.0).build(adam)).0, "clip_grad_norm");
    let last = builder().accumulation(Accumulation::ReduceLast).build(adam);
    assert_eq!(refused_option(last).0, "accumulation");
    let mut model = builder().build(adam).unwrap();
    assert_eq!(refused_option(model.accumulate(input(6), alternating(0))).0, "accumulate");
    model.step(input(6), alternating(0)).unwrap();
}

/// Returns a loss that fails in the backward pass of a unit, on the second slot.
fn failing(at: &'static str) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> + Send + Sync {
    move |ctx, model, mut x| {
        let fails_here = ctx.slot() == 1;
        for unit in ["0", "1", "2"] {
            let runs = std::sync::atomic::AtomicUsize::new(0);
            x = model.unit(unit, &x, move |vb, x| {
                let run = runs.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                if unit == at && fails_here && run == 1 {
                    bail!("no memory")
                }
                linear(3, 3, vb)?.forward(x)?.tanh()
            })?;
        }
        x.sqr()?.mean_all()
    }
}

#[test]
fn partial_update_requires_a_load() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model =
        FullyShard::builder(&mesh, layers::<3>).optimizer_in_backward().build(adam).unwrap();
    model.step(input(6), alternating(0)).unwrap();
    let checkpoint = saved(&mesh, &model);
    let before = values(&model);

    // The backward pass begins with the last unit, before any update.
    let error = model.step(input(6), failing("2")).unwrap_err().to_string();
    assert!(error.contains("unit 2, backward pass"), "{error}");
    assert_eq!(values(&model), before);
    let infinite =
        model.step(input(6), |ctx, model, x| alternating(0)(ctx, model, x)? * f64::INFINITY);
    assert!(matches!(refused(infinite), TrainingError::NonFiniteLoss { .. }));
    assert_eq!(values(&model), before);

    let error = model.step(input(6), failing("0")).unwrap_err().to_string();
    assert!(error.contains("unit 0, backward pass"), "{error}");
    let half = TrainingError::HalfUpdated;
    assert_eq!(refused(model.step(input(6), alternating(0))), half);
    assert_eq!(refused(model.evaluate(input(6), alternating(0))), half);
    assert_eq!(refused(model.check_gradients(input(6), alternating(0))), half);
    assert_eq!(refused(model.parameter("0.weight")), half);
    assert_eq!(refused(model.state_dict()), half);
    model.load(&checkpoint).unwrap();
    assert_eq!(values(&model), before);
    model.step(input(6), alternating(0)).unwrap();
    assert_eq!(model.steps(), 2);
}

#[test]
fn bad_gradients_prevent_the_update() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let build =
        || FullyShard::builder(&mesh, layers::<3>).optimizer_in_backward().build(adam).unwrap();
    let second_unit = |f: fn(VarBuilder<'_>, &Tensor) -> Result<Tensor>| {
        move |_: &Replica, model: &Units, x: Tensor| {
            let x = model.unit("1", &model.unit("0", &x, layer)?, f)?;
            model.unit("2", &x, layer)?.sqr()?.mean_all()
        }
    };
    let without_bias = second_unit(|vb, x| candle_nn::linear_no_bias(3, 3, vb)?.forward(x));
    let missing = vec!["1.bias".to_owned()];
    let expected = TrainingError::NoGradient { missing, trained: 6 };
    assert_eq!(refused(build().step(input(6), without_bias)), expected);

    // The root of 0 has no finite slope.
    let infinite = second_unit(|vb, x| {
        let y = linear(3, 3, vb)?.forward(x)?;
        &y + (&y - &y)?.sqrt()?
    });
    let error = refused(build().step(input(6), infinite));
    let TrainingError::NonFiniteNorm { variable, .. } = &error else { panic!("{error}") };
    assert_eq!(variable.as_deref(), Some("1.bias"));

    // A skipped unit is reported before any update.
    let mut model = build();
    let expected = TrainingError::NotEntered {
        unit: "1".to_owned(),
        parameters: ["1.bias", "1.weight"].map(str::to_owned).to_vec(),
    };
    assert_eq!(refused(model.step(input(6), alternating(1))), expected);
    model.step(input(6), alternating(0)).unwrap();
}
