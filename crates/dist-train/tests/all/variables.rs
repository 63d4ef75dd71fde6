//! Roles of variables: trained, unused, frozen, or buffer.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{
    BatchNorm, Linear, Module, ModuleT, Optimizer, ParamsAdamW, SGD, VarBuilder, batch_norm,
    linear, linear_no_bias,
};
use core_types::Seed;
use dist_train::{AdamW, DataParallel, DistributedModel, Error, Group, TrainingError, Units};
use pmap_mesh::{DeviceMesh, Replica, Uneven};

use crate::support::{self, LAYOUTS, layer, refused, refused_option, replicated, saved};

fn adam(group: Group) -> Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW { lr: 0.1, weight_decay: 0.1, ..ParamsAdamW::default() })
}

fn input(rows: usize) -> Tensor {
    let items = rows * 4;
    #[allow(clippy::cast_possible_truncation, reason = "sizes are small")]
    let x = Tensor::arange(0_f32, items as f32, &Device::Cpu).unwrap();
    x.affine(0.37, 1.0).unwrap().sin().unwrap().reshape((rows, 4)).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn parameter_values<M, O>(model: &DistributedModel<M, O>, name: &str) -> Vec<f32> {
    values(&model.parameters().unwrap()[name])
}

/// Runs three layers without the bias of the second.
fn without_bias(_: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    let x = model.unit("0", &x, layer)?;
    let x = model.unit("1", &x, |vb, x| linear_no_bias(3, 3, vb)?.forward(x))?;
    model.unit("2", &x, layer)?.sqr()?.mean_all()
}

fn all_values<O>(model: &DistributedModel<Units, O>) -> BTreeMap<String, Vec<f32>> {
    let parameters = model.parameters().unwrap().into_iter();
    parameters.map(|(name, value)| (name, values(&value))).collect()
}

#[test]
fn missing_gradients_are_named() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for layout in LAYOUTS {
        let mut model = layout(replicated(&mesh)).build(adam).unwrap();
        let before = all_values(&model);
        let error = model.step(support::input(4), without_bias).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("1 of 6 variables got no gradient: 1.bias."), "{text}");
        assert!(text.contains("fused_ops::layers"), "{text}");
        let missing = vec!["1.bias".to_owned()];
        let expected = TrainingError::NoGradient { missing, trained: 6 };
        assert_eq!(refused::<()>(Err(error)), expected);
        assert_eq!(all_values(&model), before, "a rejected step changes nothing");
        assert_eq!(model.steps(), 0);
        // The next step is rejected too.
        assert_eq!(refused(model.step(support::input(4), without_bias)), expected);
    }
}

#[test]
fn allowed_unused_parameters_stay_unchanged() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for layout in LAYOUTS {
        let builder = layout(replicated(&mesh)).allow_unused(["1.b*"]);
        let mut model = builder.build(adam).unwrap();
        let before = all_values(&model);
        for _ in 0..5 {
            model.step(support::input(4), without_bias).unwrap();
        }
        for (name, after) in all_values(&model) {
            // Weight decay skips it too.
            assert_eq!(after == before[&name], name == "1.bias", "{name}");
        }
    }
}

#[test]
fn later_used_variables_are_trained() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = DataParallel::builder(&mesh, |vb: VarBuilder<'_>| {
        Ok((linear_no_bias(4, 1, vb.pp("always"))?, linear_no_bias(4, 1, vb.pp("expert"))?))
    });
    let builder = builder.allow_unused(["expert"]);
    let mut model = builder.build(|group| SGD::new(group.vars, 0.1)).unwrap();
    let before = parameter_values(&model, "expert.weight");
    let loss = |uses: bool| {
        move |ctx: &Replica, (always, expert): &(Linear, Linear), x: Tensor| {
            let mut y = always.forward(&x)?;
            if uses && ctx.slot() == 1 {
                y = (y + expert.forward(&x)?)?;
            }
            y.mean_all()
        }
    };
    model.step(input(4), loss(false)).unwrap();
    assert_eq!(parameter_values(&model, "expert.weight"), before);
    model.step(input(4), loss(true)).unwrap();
    let x = input(4).narrow(0, 2, 2).unwrap();
    let expected = (x.sum(0).unwrap() * (0.1 / 4.0)).unwrap();
    for ((before, after), moved) in
        before.iter().zip(parameter_values(&model, "expert.weight")).zip(values(&expected))
    {
        assert!((before - after - moved).abs() < 1e-6);
    }
}

#[test]
fn resumed_runs_allow_missing_gradients() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let build = || DataParallel::builder(&mesh, two_layers).build(adam).unwrap();
    let mut model = build();
    model.step(input(4), two_layer_loss).unwrap();
    let mut resumed = build();
    resumed.load(&saved(&mesh, &model)).unwrap();
    let without_body =
        |_: &Replica, model: &(Linear, Linear), x: Tensor| model.1.forward(&x)?.sqr()?.mean_all();
    let losses = [model, resumed].map(|mut model| model.step(input(4), without_body).unwrap().loss);
    assert_eq!(losses[0].to_bits(), losses[1].to_bits());
    refused(build().step(input(4), without_body));
}

fn two_layers(vb: VarBuilder<'_>) -> Result<(Linear, Linear)> {
    Ok((linear(4, 4, vb.pp("body"))?, linear(4, 1, vb.pp("head"))?))
}

fn two_layer_loss(_: &Replica, model: &(Linear, Linear), x: Tensor) -> Result<Tensor> {
    model.1.forward(&model.0.forward(&x)?.tanh()?)?.sqr()?.mean_all()
}

#[test]
fn frozen_variables_have_no_state() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let build = |mesh: &DeviceMesh| {
        DataParallel::builder(mesh, two_layers).freeze(["body"]).build(adam).unwrap()
    };
    let mut model = build(&mesh);
    let (body, head) =
        (parameter_values(&model, "body.weight"), parameter_values(&model, "head.weight"));
    for _ in 0..3 {
        model.step(input(4), two_layer_loss).unwrap();
    }
    assert_eq!(parameter_values(&model, "body.weight"), body);
    assert_ne!(parameter_values(&model, "head.weight"), head);

    let checkpoint = saved(&mesh, &model);
    let mut kinds = Vec::new();
    for file in std::fs::read_dir(checkpoint.path()).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
            kinds.extend(tensors.into_keys().filter(|name| name.contains("/body")));
        }
    }
    kinds.sort();
    assert_eq!(kinds, ["model/body.bias@0", "model/body.weight@0"]);
    let mut resumed = build(&DeviceMesh::cpu(3).unwrap());
    resumed.load(&checkpoint).unwrap();
    assert_eq!(parameter_values(&resumed, "body.weight"), body);
    assert_eq!(parameter_values(&resumed, "head.weight"), parameter_values(&model, "head.weight"));
}

#[test]
fn groups_have_separate_rates() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model = DataParallel::builder(&mesh, two_layers)
        .group("no_decay", ["**.bias"])
        .group("head", ["head.weight"])
        .build(|group| {
            let weight_decay = if group.name == "no_decay" { 0.0 } else { 0.5 };
            AdamW::new(group.vars, ParamsAdamW { lr: 0.1, weight_decay, ..ParamsAdamW::default() })
        })
        .unwrap();
    let names = ["body.bias", "body.weight", "head.bias", "head.weight"];
    // With zero gradients, only weight decay changes variables.
    let no_slope = |_: &Replica, model: &(Linear, Linear), x: Tensor| {
        let y = model.1.forward(&model.0.forward(&x)?)?.mean_all()?;
        &y * y.zeros_like()?
    };
    model.set_group_learning_rate("head", 0.2).unwrap();
    let before = names.map(|name| parameter_values(&model, name));
    model.step(input(4), no_slope).unwrap();
    for (name, (before, expected)) in names.iter().zip(before.iter().zip([1.0, 0.95, 1.0, 0.9])) {
        for (after, before) in parameter_values(&model, name).iter().zip(before) {
            let ratio = after / before;
            assert!((ratio - expected).abs() < 1e-5, "{name}: {ratio} for {expected}");
        }
    }
    let (_, reason) = refused_option(model.set_group_learning_rate("tail", 0.1));
    assert_eq!(reason, "there is no group named \"tail\"");
    model.set_learning_rate(0.0).unwrap();
    let before = names.map(|name| parameter_values(&model, name));
    model.step(input(4), no_slope).unwrap();
    assert_eq!(names.map(|name| parameter_values(&model, name)), before);
}

#[test]
fn invalid_numbers_are_rejected() {
    let setting = |outcome: dist_train::Result<()>| match outcome {
        Err(error @ Error::Setting { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = || DataParallel::builder(&mesh, two_layers);
    let mut model = builder().build(adam).unwrap();
    for rate in [f64::NAN, f64::INFINITY, -0.1] {
        let expected = format!("the learning rate is {rate}, it must be a number of at least 0");
        assert_eq!(setting(model.set_learning_rate(rate)), expected);
        assert_eq!(setting(model.set_group_learning_rate("default", rate)), expected);
    }
    // The rate is unchanged, so checkpoints stay valid.
    model.load(&saved(&mesh, &model)).unwrap();
}

#[derive(Debug)]
struct Batched {
    norm: BatchNorm,
    head: Linear,
}

impl Batched {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { norm: batch_norm(4, 1e-5, vb.pp("norm"))?, head: linear(4, 1, vb.pp("head"))? })
    }

    fn loss(ctx: &Replica, model: &Self, x: Tensor) -> Result<Tensor> {
        let x = x.narrow(0, 0, ctx.valid_len().unwrap())?;
        model.head.forward(&model.norm.forward_t(&x, true)?)?.sqr()?.mean_all()
    }
}

fn batched(slots: usize) -> DistributedModel<Batched, AdamW> {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    DataParallel::builder(&mesh, Batched::new).uneven(Uneven::Pad).build(adam).unwrap()
}

#[test]
fn running_statistics_are_averaged() {
    for slots in [1, 2, 4] {
        let mut model = batched(slots);
        let mut mean = vec![0_f32; 4];
        for step in 1..=40_usize {
            let x = (input(8) * step as f64).unwrap();
            model.step(x.clone(), Batched::loss).unwrap();
            for (mean, batch) in mean.iter_mut().zip(values(&x.mean(0).unwrap())) {
                *mean = 0.9 * *mean + 0.1 * batch;
            }
        }
        model.check_in_sync().unwrap();
        for (found, expected) in parameter_values(&model, "norm.running_mean").iter().zip(&mean) {
            assert!((found - expected).abs() < 1e-4, "{slots} slots: {found} for {expected}");
        }
        // Evaluation uses the statistics from training.
        let found = parameter_values(&model, "norm.running_mean");
        let seen = |_: &Replica, model: &Batched, _: Tensor| model.norm.running_mean().sum_all();
        let seen = model.evaluate(input(8), seen).unwrap().loss;
        assert!((seen - f64::from(found.iter().sum::<f32>())).abs() < 1e-4);
        let evaluated = model.evaluate(input(8), |_: &Replica, model: &Batched, x| {
            model.norm.forward_t(&x, false)?.sqr()?.mean_all()
        });
        assert!(evaluated.unwrap().loss.is_finite());
        // Evaluation in training mode does not change them.
        model.evaluate(input(8), Batched::loss).unwrap();
        assert_eq!(parameter_values(&model, "norm.running_mean"), found);
    }
}

#[test]
fn failed_step_restores_buffers() {
    let mut model = batched(2);
    model.step(input(8), Batched::loss).unwrap();
    let before = parameter_values(&model, "norm.running_var");
    let failed = model.step((input(8) * 3.0).unwrap(), |ctx: &Replica, model: &Batched, x| {
        let loss = Batched::loss(ctx, model, x)?;
        if ctx.slot() == 1 {
            candle_core::bail!("no data")
        }
        Ok(loss)
    });
    failed.unwrap_err();
    assert_eq!(parameter_values(&model, "norm.running_var"), before);
    model.check_in_sync().unwrap();

    let mut resumed = batched(3);
    resumed.load(&saved(&DeviceMesh::cpu(2).unwrap(), &model)).unwrap();
    assert_eq!(parameter_values(&resumed, "norm.running_var"), before);
    resumed.check_in_sync().unwrap();
}

#[test]
fn nan_buffers_end_the_step() {
    // With one row per slot, the variance is NaN.
    let mut model = batched(2);
    let before = parameter_values(&model, "norm.running_var");
    let error = refused(model.step(input(2), Batched::loss));
    assert_eq!(error, TrainingError::NonFiniteBuffer { name: "norm.running_var".to_owned() });
    assert_eq!(parameter_values(&model, "norm.running_var"), before);
    // A shard of padding does not update statistics.
    let mut model = batched(4);
    model.step(input(6), Batched::loss).unwrap();
    model.check_in_sync().unwrap();
}

/// Builds a layer and a batch counter.
fn counting(vb: VarBuilder<'_>) -> Result<(Linear, Tensor)> {
    let count = vb.get_with_hints_dtype((), "num_batches", candle_nn::init::ZERO, DType::U32)?;
    Ok((linear(4, 1, vb)?, count))
}

#[test]
fn integer_buffers_take_the_maximum() {
    for slots in [1, 3] {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        let builder = DataParallel::builder(&mesh, counting).buffers(["num_batches"]).replicated();
        let mut model = builder.build(adam).unwrap();
        let step = model.step(input(6), |ctx: &Replica, (layer, count): &(Linear, Tensor), x| {
            let seen = Tensor::new(10 + ctx.slot() as u32, x.device())?;
            Var::from_tensor(count)?.set(&seen)?;
            layer.forward(&x)?.sqr()?.mean_all()
        });
        step.unwrap();
        let count = model.parameters().unwrap()["num_batches"].to_scalar::<u32>().unwrap();
        assert_eq!(count as usize, 9 + slots);
        model.check_in_sync().unwrap();
    }
}

#[test]
fn seed_and_name_determine_values() {
    let first = |slots, seed: Option<u64>| {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        let builder = DataParallel::builder(&mesh, two_layers);
        let builder = match seed {
            Some(seed) => builder.init(Seed::new(seed)),
            None => builder,
        };
        parameter_values(&builder.build(adam).unwrap(), "body.weight")
    };
    assert_eq!(first(1, None), first(3, Some(0)));
    assert_ne!(first(1, Some(1)), first(1, Some(0)));
}

#[test]
fn pretrained_weights_are_matched_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mesh = DeviceMesh::cpu(2).unwrap();
    let trained = DataParallel::builder(&mesh, two_layers).init(Seed::new(5)).build(adam).unwrap();
    candle_core::safetensors::save(&trained.parameters().unwrap().into_iter().collect(), &path)
        .unwrap();

    let again = DataParallel::builder(&mesh, two_layers).weights(&path).build(adam).unwrap();
    for name in ["body.weight", "body.bias", "head.weight", "head.bias"] {
        assert_eq!(parameter_values(&again, name), parameter_values(&trained, name));
    }

    // A new head replaces the old one.
    let other =
        |vb: VarBuilder<'_>| Ok((linear(4, 4, vb.pp("body"))?, linear(4, 2, vb.pp("tail"))?));
    let builder = || DataParallel::builder(&mesh, other).weights(&path);
    let error = builder().build(adam).unwrap_err().to_string();
    assert!(error.contains("2 of 4 parameters are missing (tail.bias, tail.weight)"), "{error}");
    let error = builder().allow_missing(["tail"]).build(adam).unwrap_err().to_string();
    assert!(error.contains("(head.bias, head.weight)"), "{error}");
    let model = builder().allow_missing(["tail"]).allow_unexpected(["head"]).build(adam).unwrap();
    assert_eq!(parameter_values(&model, "body.weight"), parameter_values(&trained, "body.weight"));
    assert_eq!(parameter_values(&model, "tail.weight").len(), 8);
}

#[test]
fn losses_may_borrow() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model = DataParallel::builder(&mesh, two_layers).build(adam).unwrap();
    let scale = vec![2.0];
    let loss = |ctx: &Replica, model: &(Linear, Linear), x: Tensor| {
        two_layer_loss(ctx, model, x)? * scale[0]
    };
    let first = model.evaluate(input(4), loss).unwrap().loss;
    assert!((model.step(input(4), loss).unwrap().loss - first).abs() < 1e-6);
    assert_eq!(scale, [2.0]);
}
