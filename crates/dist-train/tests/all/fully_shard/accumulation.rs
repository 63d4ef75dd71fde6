//! Accumulated gradients of a sharded model.

use candle_core::Tensor;
use candle_nn::{Module, linear};
use dist_train::{AdamW, DistributedModel, FullyShard, Units};
use pmap_mesh::{DeviceMesh, Replica};

use super::model::{KEEPS, adam};
use crate::support::{input, layer, layers, replicated, saved, through};

/// Asserts that two models have the same parameters up to rounding.
#[track_caller]
fn assert_near(found: &DistributedModel<Units, AdamW>, expected: &DistributedModel<Units, AdamW>) {
    for (name, value) in expected.parameters().unwrap() {
        let off = (found.parameter(&name).unwrap() - value).unwrap().abs().unwrap();
        assert!(off.max_all().unwrap().to_scalar::<f32>().unwrap() < 1e-6, "{name}");
    }
}

/// Only the first batch enters unit 1, and only the last enters unit 2.
#[test]
fn units_of_single_batches_are_updated() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let batches: [&[&str]; 3] = [&["0", "1"], &["0"], &["0", "2"]];
    let train = |model: &mut DistributedModel<Units, AdamW>| {
        for _ in 0..3 {
            model.accumulate(input(3), through(batches[0])).unwrap();
            model.accumulate(input(6), through(batches[1])).unwrap();
            model.step(input(3), through(batches[2])).unwrap();
        }
    };
    let mut expected = replicated(&mesh).build(adam).unwrap();
    train(&mut expected);
    for keep in KEEPS {
        let mut model = FullyShard::builder(&mesh, layers::<3>).keep(keep).build(adam).unwrap();
        train(&mut model);
        assert_near(&model, &expected);
    }
}

/// The second slot enters a unit but does not use its parameters.
#[test]
fn gradients_missing_on_one_slot_are_summed() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let partly =
        |ctx: &Replica, model: &Units, x: Tensor| {
            let x = model.unit("0", &x, layer)?;
            let uses_it = ctx.slot() == 0;
            let x = model.unit("1", &x, move |vb, x| {
                if uses_it { linear(3, 3, vb)?.forward(x) } else { x.tanh() }
            })?;
            model.unit("2", &x, layer)?.sqr()?.mean_all()
        };
    let sharded = FullyShard::builder(&mesh, layers::<3>);
    let [found, expected] = [sharded, replicated(&mesh)].map(|builder| {
        let mut model = builder.build(adam).unwrap();
        model.accumulate(input(4), partly).unwrap();
        model.step(input(2), through(&["0", "2"])).unwrap();
        model
    });
    assert_near(&found, &expected);
}

#[test]
fn load_discards_accumulated_batches() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let build = || FullyShard::builder(&mesh, layers::<3>).build(adam).unwrap();
    let all = || through(&["0", "1", "2"]);
    let mut model = build();
    model.accumulate(input(6), all()).unwrap();
    model.load(&saved(&mesh, &build())).unwrap();
    let found = model.step(input(2), all()).unwrap();
    let expected = build().step(input(2), all()).unwrap();
    assert_eq!(found.weight.to_bits(), expected.weight.to_bits());
    assert_eq!(found.loss.to_bits(), expected.loss.to_bits());
}

#[test]
fn failed_step_discards_accumulated_gradients() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let build = || FullyShard::builder(&mesh, layers::<3>).build(adam).unwrap();
    let (mut expected, mut found) = (build(), build());
    let all = || through(&["0", "1", "2"]);
    found.accumulate(input(2), all()).unwrap();
    found.step(input(2), |ctx, model, x| all()(ctx, model, x)? * f64::NAN).unwrap_err();
    for _ in 0..2 {
        let expected = expected.step(input(2), all()).unwrap().loss;
        assert_eq!(found.step(input(2), all()).unwrap().loss.to_bits(), expected.to_bits());
    }
}
