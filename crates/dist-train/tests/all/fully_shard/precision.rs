//! Parameters that are gathered in half precision.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use core_types::{Placement, Seed};
use dist_train::{AdamW, Declared, DistributedModel, Error, Keep, TrainingError, Units};
use fsdp_plan::strategy::{Choice, Full, Hsdp, Hybrid};
use pmap_mesh::DeviceMesh;

use super::model::{KEEPS, adam, batch, data_parallel, loss, parameters, sharded, train};
use crate::support::bits;

/// Numbers that a half holds, in whatever type they are asked for.
fn halves(declared: &Declared, items: Range<usize>) -> Result<Tensor> {
    let first = declared.name.len() as f32;
    let values: Vec<f32> = items.map(|item| (first + item as f32).sin() / 4.0).collect();
    Tensor::new(values, &Device::Cpu)?.to_dtype(DType::BF16)?.to_dtype(declared.dtype)
}

/// Losses of some steps, and of what follows them.
fn losses(model: &mut DistributedModel<Units, AdamW>, rows: usize) -> Vec<u64> {
    let mut losses: Vec<u64> =
        (0..8).map(|step| model.step(batch(rows, step), loss).unwrap().loss.to_bits()).collect();
    losses.push(model.evaluate(batch(rows, 9), loss).unwrap().loss.to_bits());
    losses
}

#[test]
fn the_bits_are_those_of_data_parallel_with_variables_of_halves() {
    for slots in 1..4 {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        let rows = 2 * slots;
        let builder = data_parallel(&mesh).dtype(DType::BF16).init_with(halves);
        let mut whole = builder.build(adam).unwrap();
        let mut expected: Vec<u64> = (0..8)
            .map(|step| whole.step(batch(rows, step), loss).unwrap().loss.to_bits())
            .collect();
        expected.push(whole.evaluate(batch(rows, 9), loss).unwrap().loss.to_bits());
        for keep in KEEPS {
            for prefetch in [0, 1] {
                let builder = sharded(&mesh).init_with(halves).keep(keep).prefetch(prefetch);
                let builder = builder.mixed_precision(DType::BF16, DType::F32);
                let mut model = builder.build(adam).unwrap();
                assert_eq!(losses(&mut model, rows), expected, "{keep:?}, {slots} slots");
                for (name, expected) in whole.parameters().unwrap() {
                    let found = model.parameter(&name).unwrap();
                    assert_eq!(found.dtype(), DType::F32, "{name}");
                    let rounded = found.to_dtype(DType::BF16).unwrap();
                    let single = |x: Tensor| bits(&x.to_dtype(DType::F32).unwrap());
                    assert_eq!(single(rounded), single(expected), "{name}");
                }
            }
        }
    }
}

#[test]
fn types_that_parameters_have_already_change_nothing() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let expected = train(sharded(&mesh).build(adam).unwrap(), 4, 5);
    let builder = sharded(&mesh).mixed_precision(DType::F32, DType::F32);
    assert_eq!(train(builder.build(adam).unwrap(), 4, 5), expected);
}

/// The bytes that are sent are those of the types.
#[test]
fn a_step_sends_what_the_schedule_says_in_these_types() {
    let grid = DeviceMesh::builder().axis("replicas", 2).axis("shards", 2).cpu().unwrap();
    let line = DeviceMesh::cpu(3).unwrap();
    let hybrid = || {
        let hybrid = Hybrid::default().with_rule("norm", Choice::Replicate).unwrap();
        hybrid.with_rule("mix", Choice::Replicate).unwrap()
    };
    for reduce_dtype in [DType::F32, DType::BF16] {
        let builder = |mesh| sharded(mesh).mixed_precision(DType::BF16, reduce_dtype);
        let models = [
            (&line, builder(&line).build(adam).unwrap()),
            (&line, builder(&line).strategy(hybrid()).build(adam).unwrap()),
            (&grid, builder(&grid).strategy(Hsdp::new(hybrid(), 2)).build(adam).unwrap()),
        ];
        for (mesh, mut model) in models {
            let before = mesh.traffic();
            let first = model.step(batch(12, 0), loss).unwrap().loss;
            let plan = model.plan().unwrap().clone();
            let schedule = plan.schedule(&model.cost_model().unwrap()).unwrap();
            let step = mesh.traffic().into_iter().zip(before);
            for (slot, (after, before)) in step.enumerate() {
                let rank = Placement::new(slot as u64, mesh.len() as u64).unwrap().rank();
                let handed = schedule.handed_over(rank).unwrap();
                let found = after - before;
                let scalars = 4 * 8 + 4 + 8 * plan.parameters().len() as u64;
                assert_eq!(found.all_gather.bytes, handed.all_gather.bytes + scalars, "{slot}");
                assert_eq!(found.reduce_scatter.bytes, handed.reduce_scatter.bytes, "{slot}");
                assert_eq!(found.all_reduce.bytes, handed.all_reduce.bytes, "{slot}");
            }
            for step in 1..20 {
                model.step(batch(12, step % 2), loss).unwrap();
            }
            assert!(model.evaluate(batch(12, 0), loss).unwrap().loss < 0.9 * first, "it learns");
        }
    }
}

/// What is trained in half precision comes to the loss of single precision, to the 2 % that are
/// asked for at the end of 60 steps.
#[test]
fn losses_of_halves_follow_those_of_single_precision() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let last = |is_mixed: bool| {
        let builder = sharded(&mesh).init(Seed::new(5));
        let builder =
            if is_mixed { builder.mixed_precision(DType::BF16, DType::F32) } else { builder };
        let mut model = builder.build(adam).unwrap();
        let first = model.evaluate(batch(8, 0), loss).unwrap().loss;
        for step in 0..60 {
            model.step(batch(8, step % 3), loss).unwrap();
        }
        let last = model.evaluate(batch(8, 0), loss).unwrap().loss;
        assert!(last < 0.8 * first, "{last} after {first}");
        last
    };
    let (single, mixed) = (last(false), last(true));
    assert!((mixed / single - 1.0).abs() < 0.02, "{mixed} for {single}");
}

#[test]
fn half_precision_of_a_small_range_needs_a_scaler() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let refused = sharded(&mesh).mixed_precision(DType::F16, DType::F32).build(adam).unwrap_err();
    let is_refused = matches!(
        &refused,
        Error::Training(TrainingError::UnfitDtype { option: "param_dtype", dtype: "f16", hint })
            if hint.contains("bf16") && hint.contains("allow_non_finite")
    );
    assert!(is_refused, "{refused}");
    let scaled = sharded(&mesh).mixed_precision(DType::F16, DType::F32).allow_non_finite();
    let mut model = scaled.keep(Keep::Graph).strategy(Full::default()).build(adam).unwrap();
    model.step(batch(4, 0), loss).unwrap();
    assert_eq!(parameters(&model).len(), model.plan().unwrap().parameters().len());
}
