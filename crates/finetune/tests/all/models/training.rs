//! Fine-tuning, on one device and on several, whole and sharded, in single and in half precision.

use std::f64::consts::PI;

use candle_core::{DType, Tensor};
use candle_nn::{Optimizer, ParamsAdamW};
use core_types::Seed;
use dist_train::{AdamW, DataParallel, FullyShard, Group, Keep, Loss, Units};
use finetune::models::{Llama, Tokens};
use fsdp_plan::strategy::{Full, Layout};
use pmap_mesh::{DeviceMesh, Replica, Uneven};
use serde_json::Value;

use crate::models::golden::{Golden, MODELS, ids, labels};

pub(crate) const STEPS: usize = 50;

#[test]
fn fine_tuning_losses_match_transformers() {
    for model in MODELS {
        let golden = Golden::open(model);
        for slots in [1, 2] {
            let steps = data_parallel(&golden, slots, STEPS, 1., DType::F32);
            assert_near(&golden.expected["finetune"], &steps, [1e-5, 1e-5], model);
        }
    }
}

#[test]
fn bf16_losses_match_transformers() {
    let golden = Golden::open("llama");
    for slots in [1, 2] {
        let steps = data_parallel(&golden, slots, 20, 1., DType::BF16);
        assert_near(&golden.expected["bf16"], &steps, [0.02, 0.05], "halves");
    }
}

#[test]
fn sharded_losses_equal_data_parallel() {
    for model in MODELS {
        let golden = Golden::open(model);
        for slots in [2, 3] {
            // A norm that clips would be summed in another order, so the limit is high.
            let expected = data_parallel(&golden, slots, 6, NEVER, DType::F32);
            for keep in [Keep::Inputs, Keep::Graph, Keep::Gathered] {
                let found = sharded(&golden, slots, keep);
                let pairs = found.iter().zip(&expected);
                let distances = pairs.map(|((found, _), (expected, _))| (found - expected).abs());
                let distance = distances.fold(0., f64::max);
                // The gradients of a tied head are summed in each of two units.
                let most = if golden.llama.config().tie_word_embeddings { 1e-6 } else { 0. };
                assert!(distance <= most, "{model}, {slots} slots, {keep:?}: {distance}");
            }
        }
    }
}

#[test]
fn random_weights_match_transformers_spread() {
    let mesh = DeviceMesh::cpu(1).unwrap();
    let llama = Golden::open("qwen2").llama;
    let model = DataParallel::builder(&mesh, |vb| llama.declare(&vb))
        .by_units(llama.units())
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

/// A limit above the norm of any gradients.
const NEVER: f64 = 1e9;

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
    let weight_decay = if group.name == "no_decay" { 0. } else { 0.01 };
    AdamW::new(group.vars, ParamsAdamW { weight_decay, ..ParamsAdamW::default() })
}

/// Returns the patterns of one-dimensional parameters.
fn no_decay(llama: &Llama) -> Vec<&'static str> {
    let biases = llama.config().attention_bias.then_some("bias");
    Llama::NORMS.into_iter().chain(biases).collect()
}

/// Trains `steps` steps with data parallelism, and returns the losses and norms.
fn data_parallel(
    golden: &Golden,
    slots: usize,
    steps: usize,
    max_norm: f64,
    dtype: DType,
) -> Vec<(f64, f64)> {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    let llama = golden.llama.clone();
    let course = if dtype == DType::F32 { STEPS } else { steps };
    let mut model = DataParallel::builder(&mesh, |vb| llama.declare(&vb))
        .by_units(llama.units())
        .weights(&golden.folder)
        .dtype(dtype)
        .group("no_decay", no_decay(&llama))
        .clip_grad_norm(max_norm)
        .uneven(Uneven::Balanced)
        .build(optimizer)
        .unwrap();
    (0..steps)
        .map(|step| {
            model.set_learning_rate(rate(step, course)).unwrap();
            let step = model.step(batch(golden, step), loss(&llama)).unwrap();
            (step.loss, step.grad_norm)
        })
        .collect()
}

/// Trains 6 steps of a sharded model, and returns the losses and norms.
fn sharded(golden: &Golden, slots: usize, keep: Keep) -> Vec<(f64, f64)> {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    let llama = golden.llama.clone();
    let mut model = FullyShard::builder(&mesh, |vb| llama.declare(&vb))
        .by_units(llama.units())
        .strategy(Full::new(Layout::Dim0))
        .keep(keep)
        .weights(&golden.folder)
        .group("no_decay", no_decay(&llama))
        .clip_grad_norm(NEVER)
        .uneven(Uneven::Balanced)
        .build(optimizer)
        .unwrap();
    (0..6)
        .map(|step| {
            model.set_learning_rate(rate(step, STEPS)).unwrap();
            let step = model.step(batch(golden, step), loss(&llama)).unwrap();
            (step.loss, step.grad_norm)
        })
        .collect()
}

pub(crate) fn loss(
    llama: &Llama,
) -> impl Fn(&Replica, &Units, (Tensor, Tensor)) -> candle_core::Result<Loss> + Send + Sync + 'static
{
    let llama = llama.clone();
    move |_, model, (ids, labels)| llama.loss(model, &Tokens::rows(ids), &labels)
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
