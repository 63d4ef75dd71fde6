//! Half precision for parameters and gradients.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use dist_train::{AdamW, Declared, DistributedModel, Keep, ModelBuilder, Units};
use fsdp_plan::strategy::Full;
use pmap_mesh::DeviceMesh;

use super::model::{KEEPS, adam, batch, data_parallel, loss, parameters, sharded};
use crate::support::{LAYOUTS, assert_same, bits, refused_option, saved};

/// Returns bf16 numbers in the requested dtype.
fn halves(declared: &Declared, items: Range<usize>) -> Result<Tensor> {
    let first = declared.name.len() as f32;
    let values: Vec<f32> = items.map(|item| (first + item as f32).sin() / 4.0).collect();
    Tensor::new(values, &Device::Cpu)?.to_dtype(DType::BF16)?.to_dtype(declared.dtype)
}

/// A setter of dtypes on a builder.
type Numbers = for<'a> fn(ModelBuilder<'a, Units>) -> ModelBuilder<'a, Units>;

/// Computes in bf16 and stores f32.
fn mixed(builder: ModelBuilder<'_, Units>) -> ModelBuilder<'_, Units> {
    builder.mixed_precision(DType::BF16, DType::F32)
}

/// Computes and reduces gradients in bf16.
fn reduced(builder: ModelBuilder<'_, Units>) -> ModelBuilder<'_, Units> {
    builder.mixed_precision(DType::BF16, DType::BF16)
}

/// Stores bf16; the optimizer has f32 master weights.
fn stored(builder: ModelBuilder<'_, Units>) -> ModelBuilder<'_, Units> {
    builder.dtype(DType::BF16).init_with(halves)
}

/// Trains for some steps, evaluates, and returns all losses.
fn losses(model: &mut DistributedModel<Units, AdamW>, steps: Range<usize>) -> Vec<u64> {
    let rows = 12;
    let mut losses: Vec<u64> =
        steps.map(|step| model.step(batch(rows, step), loss).unwrap().loss.to_bits()).collect();
    losses.push(model.evaluate(batch(rows, 9), loss).unwrap().loss.to_bits());
    losses
}

/// Returns the bits of all parameters rounded to bf16.
fn rounded(model: &DistributedModel<Units, AdamW>) -> Vec<Vec<u32>> {
    let halves =
        model.parameters().unwrap().into_values().map(|x| x.to_dtype(DType::BF16).unwrap());
    halves.map(|half| bits(&half.to_dtype(DType::F32).unwrap())).collect()
}

#[test]
fn layouts_have_the_same_bits() {
    for slots in [1, 3] {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        for numbers in [mixed, reduced] as [Numbers; 2] {
            let mut whole = numbers(data_parallel(&mesh)).build(adam).unwrap();
            let expected = losses(&mut whole, 0..4);
            for (keep, prefetch) in KEEPS.into_iter().zip([0, 1, 0]) {
                let builder = numbers(sharded(&mesh)).keep(keep).prefetch(prefetch);
                let mut model = builder.build(adam).unwrap();
                assert_eq!(losses(&mut model, 0..4), expected, "{keep:?}, {slots} slots");
                assert_same(&model, &whole);
            }
        }
    }
}

/// From initial values that bf16 represents exactly, storing bf16 and computing in bf16 give the
/// same bits, because the master weights are equal.
#[test]
fn checkpoints_resume_in_the_other_layout() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let kinds = [mixed as Numbers, stored].into_iter();
    let kinds: Vec<(Numbers, Numbers)> =
        kinds.flat_map(|numbers| LAYOUTS.map(|layout| (numbers, layout))).collect();
    let build = |(numbers, layout): (Numbers, Numbers)| {
        numbers(layout(data_parallel(&mesh)).init_with(halves)).build(adam).unwrap()
    };
    let mut written = Vec::new();
    for &kind in &kinds {
        let mut model = build(kind);
        let before = losses(&mut model, 0..3);
        let checkpoint = saved(&mesh, &model);
        let after = losses(&mut model, 3..5);
        written.push((before, checkpoint, after, rounded(&model)));
    }
    let (before, _, after, parameters) = &written[0];
    for (wrote, (other, checkpoint, ..)) in written.iter().enumerate() {
        assert_eq!(other, before, "{wrote}");
        for (read, &kind) in kinds.iter().enumerate() {
            let mut model = build(kind);
            model.load(checkpoint).unwrap();
            assert_eq!(losses(&mut model, 3..5), *after, "{read} after {wrote}");
            assert_eq!(rounded(&model), *parameters, "{read} after {wrote}");
        }
    }
}

#[test]
fn half_precision_gradients_are_checked() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for layout in LAYOUTS {
        let mut model = mixed(layout(data_parallel(&mesh))).build(adam).unwrap();
        let before = model.parameters().unwrap().into_values().map(|whole| bits(&whole));
        let before: Vec<_> = before.collect();
        model.check_gradients(batch(12, 0), loss).unwrap();
        let after = model.parameters().unwrap().into_values().map(|whole| bits(&whole));
        assert_eq!(after.collect::<Vec<_>>(), before);
    }
}

#[test]
fn f16_requires_allow_non_finite() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let refused = sharded(&mesh).mixed_precision(DType::F16, DType::F32).build(adam).unwrap_err();
    let (option, reason) = refused_option::<()>(Err(refused));
    assert!(option == "mixed_precision" && reason.contains("f16 as param_dtype"), "{reason}");
    assert!(reason.contains("use bf16") && reason.contains("allow_non_finite"), "{reason}");
    let scaled = sharded(&mesh).mixed_precision(DType::F16, DType::F32).allow_non_finite();
    let mut model = scaled.keep(Keep::Graph).strategy(Full::default()).build(adam).unwrap();
    model.step(batch(4, 0), loss).unwrap();
    assert_eq!(parameters(&model).len(), model.plan().unwrap().parameters().len());
}
