//! Random weights, and the parts of fine-tuning: batches, learning rates, the loss.

use std::f64::consts::PI;

use candle_core::Tensor;
use candle_nn::{Optimizer, ParamsAdamW};
use core_types::Seed;
use dist_train::{AdamW, DataParallel, Group, Loss, Units};
use finetune::models::{Decoder, Tokens};
use pmap_mesh::{DeviceMesh, Replica};
use serde_json::Value;

use crate::models::golden::{Golden, ids, labels};

pub(crate) const STEPS: usize = 50;

#[test]
fn random_weights_match_transformers_spread() {
    let mesh = DeviceMesh::cpu(1).unwrap();
    let decoder = Golden::open("qwen2").decoder;
    let model = DataParallel::builder(&mesh, |vb| decoder.declare(&vb))
        .by_units(decoder.units())
        .init(Seed::new(1))
        .build(optimizer)
        .unwrap();
    for (name, tensor) in model.parameters().unwrap() {
        let mean = tensor.mean_all().unwrap().to_scalar::<f32>().unwrap();
        let square = tensor.sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap();
        match name.rsplit_once('.').unwrap() {
            (layer, "weight") if layer.ends_with("norm") => assert_eq!((mean, square), (1., 1.)),
            (_, "weight") => assert!((square.sqrt() - 0.1).abs() < 0.01, "{name}: {square}"),
            _ => assert_eq!((mean, square), (0., 0.)),
        }
    }
}

/// Checks that losses and norms of steps differ by less than `most`.
pub(crate) fn assert_near(expected: &Value, steps: &[(f64, f64)], most: [f64; 2], what: &str) {
    let losses = Golden::numbers(&expected["loss"]);
    let norms = Golden::numbers(&expected["grad_norm"]);
    assert_eq!((losses.len(), norms.len()), (steps.len(), steps.len()), "{what}");
    for (step, (&(loss, norm), (expected, expected_norm))) in
        steps.iter().zip(losses.iter().zip(norms)).enumerate()
    {
        assert!((loss - expected).abs() < most[0], "{what}, step {step}: {loss}, {expected}");
        let is_near = (norm - expected_norm).abs() < most[1];
        assert!(is_near, "{what}, step {step}: norm {norm}, {expected_norm}");
    }
}

/// Returns the learning rate of a step in a run of `steps` steps.
pub(crate) fn rate(step: usize, steps: usize) -> f64 {
    let warmup = 5;
    let factor = if step < warmup {
        (step + 1) as f64 / warmup as f64
    } else {
        let progress = (step - warmup) as f64 / (steps - warmup) as f64;
        0.1 + 0.9 * 0.5 * (1. + (PI * progress).cos())
    };
    1e-3 * factor
}

pub(crate) fn optimizer(group: Group) -> candle_core::Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW { weight_decay: 0.01, ..ParamsAdamW::default() })
}

pub(crate) fn loss(
    decoder: &Decoder,
) -> impl Fn(&Replica, &Units, (Tensor, Tensor)) -> candle_core::Result<Loss> + Send + Sync + 'static
{
    let decoder = decoder.clone();
    move |_, model, (ids, labels)| {
        let decoder = decoder.clone().with_context(ids.dim(1)?);
        decoder.loss(model, &Tokens::rows(ids), &labels)
    }
}

/// Returns the token ids of a step, and its labels: all tokens except padding.
pub(crate) fn batch(golden: &Golden, step: usize) -> (Tensor, Tensor) {
    let batches = golden.expected["batches"].as_array().unwrap();
    let batch = &batches[step % batches.len()];
    let tokens = Golden::rows(&batch["input_ids"]);
    let lengths = batch["lengths"].as_array().unwrap().iter().map(|len| len.as_u64().unwrap());
    let mut targets = tokens.clone();
    for (row, len) in targets.iter_mut().zip(lengths) {
        row[usize::try_from(len).unwrap()..].fill(-100);
    }
    (ids(&tokens), labels(&targets))
}
