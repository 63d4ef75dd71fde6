//! Options of a step, compared with data parallel.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::Optimizer;
use dist_train::{DataParallel, FullyShard, Group, Keep, Loss, ParamsSgd, Sgd, UnitRules, Units};
use pmap_mesh::{DeviceMesh, Replica, Uneven};

use super::model::{
    KEEPS, adam, batch, data_parallel, loss, names, parameters, sharded, tied, train,
};
use crate::support::{assert_same, bits, layer, layers};

/// Asserts that parameters are equal up to rounding.
fn assert_close(found: &BTreeMap<String, Vec<u32>>, expected: &BTreeMap<String, Vec<u32>>) {
    for (name, expected) in expected {
        for (found, expected) in found[name].iter().zip(expected) {
            let (found, expected) = (f32::from_bits(*found), f32::from_bits(*expected));
            let off = (found - expected).abs();
            assert!(off <= 2e-6 * expected.abs().max(1.0), "{name}: {found} for {expected}");
        }
    }
}

#[test]
fn clipped_accumulation_agrees_to_rounding() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let mut expected = data_parallel(&mesh).clip_grad_norm(0.3).build(adam).unwrap();
    let mut norms = Vec::new();
    let mut losses = Vec::new();
    for step in 0..5 {
        losses.push(expected.accumulate(batch(6, step), loss).unwrap().loss);
        let step = expected.step(batch(3, 100 + step), loss).unwrap();
        assert!(step.grad_norm > 0.3, "gradients are clipped");
        losses.push(step.loss);
        norms.push(step.grad_norm);
    }
    let mut runs = Vec::new();
    for keep in KEEPS {
        let mut model = sharded(&mesh).keep(keep).clip_grad_norm(0.3).build(adam).unwrap();
        let mut found = Vec::new();
        for (step, norm) in norms.iter().enumerate() {
            found.push(model.accumulate(batch(6, step), loss).unwrap().loss);
            let done = model.step(batch(3, 100 + step), loss).unwrap();
            found.push(done.loss);
            assert!((done.grad_norm / norm - 1.0).abs() < 1e-5);
            assert!((done.weight - 9.0).abs() < 1e-12);
        }
        for (found, expected) in found.iter().zip(&losses) {
            assert!((found / expected - 1.0).abs() < 1e-5, "{found} for {expected}");
        }
        assert_close(&parameters(&model), &parameters(&expected));
        runs.push((found, parameters(&model)));
    }
    assert!(runs.iter().all(|run| *run == runs[0]), "every keep has the same bits");
}

/// Two full units, and a layer of another.
const FROZEN: [&str; 4] = ["tokens", "positions", "blocks.0", "blocks.1.up"];

#[test]
fn groups_and_frozen_parameters_agree() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = data_parallel(&mesh).freeze(FROZEN).group("bias", ["**.bias"]);
    let mut whole_model = builder.build(adam).unwrap();
    whole_model.set_group_learning_rate("bias", 0.1).unwrap();
    let before = parameters(&whole_model);
    let expected = train(whole_model, 4, 4);
    for keep in KEEPS {
        let builder = sharded(&mesh).keep(keep).freeze(FROZEN).group("bias", ["**.bias"]);
        let mut model = builder.build(adam).unwrap();
        model.set_group_learning_rate("bias", 0.1).unwrap();
        let found = train(model, 4, 4);
        assert_eq!(found, expected, "{keep:?}");
        for name in names() {
            let is_frozen = FROZEN.iter().any(|prefix| name.starts_with(prefix));
            assert_eq!(found.parameters[&name] == before[&name], is_frozen, "{name}");
        }
    }
}

fn sgd(group: Group) -> Result<Sgd> {
    Sgd::new(group.vars, ParamsSgd { lr: 0.1, momentum: 0.9, ..ParamsSgd::default() })
}

/// Sums the loss over rows that are not padding.
fn padded(ctx: &Replica, model: &Units, x: Tensor) -> Result<Loss<Tensor>> {
    let rows = ctx.valid_len().unwrap_or(x.dim(0)?);
    let y = model.unit("1", &model.unit("0", &x, layer)?, layer)?;
    let mask: Vec<f32> = (0..x.dim(0)?).map(|row| if row < rows { 1.0 } else { 0.0 }).collect();
    let mask = Tensor::from_vec(mask, (x.dim(0)?, 1), x.device())?;
    let sum = y.sqr()?.broadcast_mul(&mask)?.sum_all()?;
    // NaN without rows, like a mean.
    let factor = if rows == 0 { f64::NAN } else { 1.0 };
    Ok(Loss::sum((&sum * factor)?, rows).with(sum))
}

#[test]
fn padded_batches_equal_data_parallel() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let x = |rows: usize| {
        let items = Tensor::arange(0_f32, (rows * 3) as f32, &Device::Cpu).unwrap();
        items.sin().unwrap().reshape((rows, 3)).unwrap()
    };
    let text = |step: dist_train::Step<Tensor>| {
        (step.loss.to_bits(), step.grad_norm, step.weight.to_bits(), bits(&step.aux))
    };
    let mut expected = DataParallel::builder(&mesh, layers::<2>)
        .by_units(UnitRules::new())
        .uneven(Uneven::Pad)
        .build(sgd)
        .unwrap();
    let mut model = FullyShard::builder(&mesh, layers::<2>).uneven(Uneven::Pad).build(sgd).unwrap();
    // The last slot has a padding row with 5 rows, and only padding with 4 or fewer.
    for rows in [6, 5, 4, 2, 6] {
        let expected = text(expected.step(x(rows), padded).unwrap());
        let found = text(model.step(x(rows), padded).unwrap());
        assert_eq!((found.0, found.2, found.3), (expected.0, expected.2, expected.3));
        assert!((found.1 / expected.1 - 1.0).abs() < 1e-12);
        let evaluated = model.evaluate(x(rows), padded).unwrap();
        assert_eq!(evaluated.weight.to_bits(), (rows as f64).to_bits());
    }
    assert_same(&model, &expected);
    let evaluated = model.evaluate(x(5), padded).unwrap();
    let expected = expected.evaluate(x(5), padded).unwrap();
    assert_eq!(evaluated.loss.to_bits(), expected.loss.to_bits());
}

#[test]
fn bf16_gradients_sum_in_f32() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let x = Tensor::ones((4, 3), DType::BF16, &Device::Cpu).unwrap();
    let unit_loss = |_: &Replica, model: &Units, x: Tensor| {
        model.unit("1", &model.unit("0", &x, layer)?, layer)?.sqr()?.mean_all()
    };
    let mut expected = DataParallel::builder(&mesh, layers::<2>)
        .by_units(UnitRules::new())
        .dtype(DType::BF16)
        .build(sgd)
        .unwrap();
    let mut model = FullyShard::builder(&mesh, layers::<2>).dtype(DType::BF16).build(sgd).unwrap();
    for _ in 0..5 {
        let expected = expected.step(x.clone(), unit_loss).unwrap().loss;
        assert_eq!(model.step(x.clone(), unit_loss).unwrap().loss.to_bits(), expected.to_bits());
    }
    for (name, value) in expected.parameters().unwrap() {
        let single = |tensor: Tensor| bits(&tensor.to_dtype(DType::F32).unwrap());
        assert_eq!(single(model.parameter(&name).unwrap()), single(value), "{name}");
    }
}

#[test]
fn repeated_units_agree_to_rounding() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let shared = |_: &Replica, model: &Units, x: Tensor| {
        let first = model.unit("0", &x, layer)?;
        let second = model.unit("1", &first, layer)?;
        (model.unit("0", &second, layer)? + first)?.sqr()?.mean_all()
    };
    let x = Tensor::arange(0_f32, 12., &Device::Cpu).unwrap().sin().unwrap();
    let x = x.reshape((4, 3)).unwrap();
    let mut expected =
        DataParallel::builder(&mesh, layers::<2>).by_units(UnitRules::new()).build(sgd).unwrap();
    let expected: Vec<f64> =
        (0..6).map(|_| expected.step(x.clone(), shared).unwrap().loss).collect();
    let trained = |keep| {
        let mut model = FullyShard::builder(&mesh, layers::<2>).keep(keep).build(sgd).unwrap();
        (0..6).map(|_| model.step(x.clone(), shared).unwrap().loss).collect::<Vec<f64>>()
    };
    let found = trained(Keep::Inputs);
    assert_eq!(found, trained(Keep::Graph), "to the bit");
    assert_eq!(found, trained(Keep::Gathered), "to the bit");
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} for {expected}");
    }
}

#[test]
fn tied_units_agree_to_rounding() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    // The second unit contains both layers.
    let rules = || UnitRules::new().unit("first", ["0"]).unit("both", ["0", "1"]);
    let x = Tensor::arange(0_f32, 12., &Device::Cpu).unwrap().sin().unwrap();
    let x = x.reshape((4, 3)).unwrap();
    let mut expected =
        DataParallel::builder(&mesh, layers::<2>).by_units(rules()).build(sgd).unwrap();
    let expected: Vec<f64> = (0..6).map(|_| expected.step(x.clone(), tied).unwrap().loss).collect();
    let trained = |keep| {
        let builder = FullyShard::builder(&mesh, layers::<2>).by_units(rules()).keep(keep);
        let mut model = builder.build(sgd).unwrap();
        assert_eq!(model.units().collect::<Vec<_>>(), ["both", "first"]);
        (0..6).map(|_| model.step(x.clone(), tied).unwrap().loss).collect::<Vec<f64>>()
    };
    let found = trained(Keep::Inputs);
    assert_eq!(found, trained(Keep::Graph), "to the bit");
    assert_eq!(found, trained(Keep::Gathered), "to the bit");
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} for {expected}");
    }
}
