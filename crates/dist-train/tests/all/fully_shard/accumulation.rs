//! Accumulated gradients, reduced in every batch or in the last.

use candle_core::{Result, Tensor};
use candle_nn::{Module, linear};
use dist_train::{Accumulation, FullyShard, Loss, ModelBuilder, Units};
use pmap_mesh::{DeviceMesh, Replica};

use super::model::{
    KEEPS, Trained, adam, batch, data_parallel, loss, parameters, sharded, strategies,
};
use crate::support::{assert_same, bits, input, layer, layers, replicated, saved, through};

/// Trains for steps of three batches each; the last batch has half as many rows.
fn trained(builder: ModelBuilder<'_, Units>, slots: usize) -> Trained {
    let mut model = builder.build(adam).unwrap();
    let mut losses = Vec::new();
    for step in 0..2 {
        for part in 0..2 {
            let ids = batch(2 * slots, 10 * step + part);
            losses.push(model.accumulate(ids, loss).unwrap().loss.to_bits());
        }
        losses.push(model.step(batch(slots, 10 * step + 2), loss).unwrap().loss.to_bits());
    }
    Trained { losses, parameters: parameters(&model) }
}

#[test]
fn reduce_last_equals_data_parallel() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let expected = trained(data_parallel(&mesh), 3);
    for (n, (name, strategy)) in strategies().into_iter().enumerate() {
        let (keep, prefetch) = (KEEPS[n % 3], n % 2);
        let builder = sharded(&mesh).keep(keep).strategy(strategy).prefetch(prefetch);
        let found = trained(builder.accumulation(Accumulation::ReduceLast), 3);
        assert_eq!(found, expected, "{keep:?}, {name}, {prefetch} ahead");
    }
}

#[test]
fn reduce_last_sends_less() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let reductions = |accumulation| {
        let mut model = sharded(&mesh).accumulation(accumulation).build(adam).unwrap();
        let before = mesh.traffic()[0].reduce_scatter.calls;
        for step in 0..3 {
            model.accumulate(batch(2, step), loss).unwrap();
        }
        let accumulated = mesh.traffic()[0].reduce_scatter.calls - before;
        model.step(batch(2, 3), loss).unwrap();
        (accumulated, mesh.traffic()[0].reduce_scatter.calls - before)
    };
    assert_eq!(reductions(Accumulation::ReduceEach), (15, 20));
    assert_eq!(reductions(Accumulation::ReduceLast), (0, 5));
}

/// Only the first batch enters unit 1, and only the last enters unit 2.
#[test]
fn units_of_single_batches_are_updated() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let batches: [&[&str]; 3] = [&["0", "1"], &["0"], &["0", "2"]];
    let mut expected = replicated(&mesh).build(adam).unwrap();
    for _ in 0..3 {
        expected.accumulate(input(3), through(batches[0])).unwrap();
        expected.accumulate(input(6), through(batches[1])).unwrap();
        expected.step(input(3), through(batches[2])).unwrap();
    }
    for keep in KEEPS {
        for accumulation in [Accumulation::ReduceEach, Accumulation::ReduceLast] {
            let builder = FullyShard::builder(&mesh, layers::<3>).keep(keep);
            let mut model = builder.accumulation(accumulation).build(adam).unwrap();
            for _ in 0..3 {
                model.accumulate(input(3), through(batches[0])).unwrap();
                model.accumulate(input(6), through(batches[1])).unwrap();
                model.step(input(3), through(batches[2])).unwrap();
            }
            for (name, value) in expected.parameters().unwrap() {
                let found = model.parameter(&name).unwrap();
                if accumulation == Accumulation::ReduceLast {
                    assert_eq!(bits(&found), bits(&value), "{name}, {keep:?}");
                }
                let off = (found - value).unwrap().abs().unwrap().max_all().unwrap();
                assert!(off.to_scalar::<f32>().unwrap() < 1e-6, "{name}, {keep:?}");
            }
        }
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
    check_accumulated(&mesh, partly, &["0", "2"]);
}

/// Trains on batches of two losses in both layouts, and compares the parameters.
fn check_accumulated<L: Into<Loss>>(
    mesh: &DeviceMesh,
    loss: impl Fn(&Replica, &Units, Tensor) -> Result<L> + Send + Sync,
    last: &'static [&'static str],
) {
    let last_sums = FullyShard::builder(mesh, layers::<3>).accumulation(Accumulation::ReduceLast);
    let [found, expected] = [last_sums, replicated(mesh)].map(|builder| {
        let mut model = builder.build(adam).unwrap();
        model.accumulate(input(4), &loss).unwrap();
        model.step(input(2), through(last)).unwrap();
        model
    });
    assert_same(&found, &expected);
}

#[test]
fn load_discards_accumulated_batches() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for accumulation in [Accumulation::ReduceEach, Accumulation::ReduceLast] {
        let build = || {
            let builder = FullyShard::builder(&mesh, layers::<3>).accumulation(accumulation);
            builder.build(adam).unwrap()
        };
        let all = || through(&["0", "1", "2"]);
        let mut model = build();
        model.accumulate(input(6), all()).unwrap();
        model.load(&saved(&mesh, &build())).unwrap();
        let found = model.step(input(2), all()).unwrap();
        let expected = build().step(input(2), all()).unwrap();
        assert_eq!(found.weight.to_bits(), expected.weight.to_bits());
        assert_eq!(found.loss.to_bits(), expected.loss.to_bits(), "{accumulation:?}");
    }
}

#[test]
fn failed_step_discards_accumulated_gradients() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let build = || {
        let builder = FullyShard::builder(&mesh, layers::<3>);
        builder.accumulation(Accumulation::ReduceLast).build(adam).unwrap()
    };
    let (mut expected, mut found) = (build(), build());
    let all = || through(&["0", "1", "2"]);
    found.accumulate(input(2), all()).unwrap();
    found.step(input(2), |ctx, model, x| all()(ctx, model, x)? * f64::NAN).unwrap_err();
    for _ in 0..2 {
        let expected = expected.step(input(2), all()).unwrap().loss;
        assert_eq!(found.step(input(2), all()).unwrap().loss.to_bits(), expected.to_bits());
    }
}
