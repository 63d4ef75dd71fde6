//! Fine-tunes a BERT classifier on two devices. Interrupt it and start it again: it resumes in the
//! middle of the epoch, and ends with the same weights as an uninterrupted run, bit for bit.
//!
//! ```sh
//! cargo run -p candle-distributed --features candle,ops,serde --example finetune_bert -- bert
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its progress")]

mod bert;
mod task;
#[cfg(test)]
mod tests;

use std::process::ExitCode;

use candle_core::{DType, Tensor};
use candle_distributed::{
    batch::{
        BatchConfig, BatchState, Cut, DistributedBatchSampler, DistributedConfig,
        DynamicBatchSampler, DynamicBatchStrategy,
    },
    mesh::{BatchKeys, DeviceMesh, Replica, Uneven, init_threads},
    ops::{self, CrossEntropyConfig},
    sampler::{DistributedSampler, SamplerConfig},
    train::{AdamW, Checkpoints, DataParallel, DistributedModel, Loss, Schedule},
    types::{Epoch, Placement, Seed},
};
use candle_nn::{Optimizer, ParamsAdamW};

use crate::bert::{BertClassifier, BertConfig};
use crate::task::{LabeledTexts, MAX_LENGTH, TextBatch, VOCABULARY};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
type Model = DistributedModel<BertClassifier, AdamW>;
const STEPS: u64 = 400;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    init_threads(2)?; // before anything starts a thread
    let folder = std::env::args().nth(1).ok_or("usage: finetune_bert FOLDER")?;
    let mesh = DeviceMesh::cpu(2)?; // two virtual devices; `DeviceMesh::cuda(2)` for two GPUs
    let mut model = model(&mesh, &[])?;
    train(&mesh, &mut model, &Checkpoints::new(folder), STEPS)?;
    println!("accuracy on new texts: {:.3}", accuracy(&mut model)?);
    Ok(())
}

fn model(mesh: &DeviceMesh, frozen: &[&str]) -> Result<Model> {
    let config = BertConfig::small(VOCABULARY, MAX_LENGTH);
    Ok(DataParallel::builder(mesh, |vb| BertClassifier::new(&config, &vb))
        .init(Seed::new(1)) // or `.weights("model.safetensors").allow_missing(["classifier"])`
        .seed(Seed::new(2)) // of the dropout
        .freeze(frozen.iter().copied())
        .group("no_decay", ["bias", "LayerNorm"])
        .clip_grad_norm(1.0)
        .schedule(Schedule::linear(STEPS).warmup(20))
        .uneven(Uneven::Balanced)
        .build(|group| {
            let weight_decay = if group.name == "no_decay" { 0.0 } else { 0.01 };
            AdamW::new(group.vars, ParamsAdamW { lr: 5e-3, weight_decay, ..ParamsAdamW::default() })
        })?)
}

/// Trains up to step `last` from the newest checkpoint, or from the start.
fn train(mesh: &DeviceMesh, model: &mut Model, checkpoints: &Checkpoints, last: u64) -> Result<()> {
    let texts = LabeledTexts::draw(Seed::new(3), 8192);
    let mut order = DistributedSampler::new(8192, Placement::SINGLE, SamplerConfig::default())?;
    let sorted = DynamicBatchStrategy::Sorted { window: Some(256), cut: Cut::Optimal };
    let config = BatchConfig::default().with_strategy(sorted).with_max_tokens(1024);
    let batches = DynamicBatchSampler::new(texts.lengths(), config)?;
    let config = DistributedConfig { shuffle: Some(Seed::new(4)), ..DistributedConfig::default() };
    let batches = DistributedBatchSampler::new(batches, Placement::SINGLE, config)?;

    let mut steps = batches.epoch(Epoch::ZERO, &order)?;
    if let Some(checkpoint) = checkpoints.latest()? {
        model.load(&checkpoint)?;
        let state: BatchState = checkpoint.state()?;
        order.set_epoch(state.epoch);
        steps = batches.resume(&state, &order)?;
    }
    while model.steps() < last {
        let Some(step) = steps.next() else {
            order.set_epoch(Epoch::new(order.epoch().as_u64() + 1));
            steps = batches.epoch(order.epoch(), &order)?;
            continue;
        };
        let batch = texts.collate(&step.micro_batches[0])?;
        let done =
            model.step(batch, |ctx, model, batch| loss(model, batch, Some(ctx.batch_keys())))?;
        if model.steps().is_multiple_of(50) {
            println!("step {}: loss {:.4}, norm {:.2}", model.steps(), done.loss, done.grad_norm);
            checkpoints.save(mesh, model.steps(), &model.state_dict()?, &steps.state())?;
        }
    }
    Ok(())
}

/// Computes the loss of a batch and the number of correct texts.
fn loss(
    model: &BertClassifier,
    (ids, mask, labels): TextBatch,
    keys: Option<BatchKeys>,
) -> candle_core::Result<Loss<Tensor>> {
    let logits = model.forward(&ids, &mask, keys)?;
    let correct = logits.argmax(1)?.eq(&labels)?.to_dtype(DType::F32)?.sum_all()?;
    let all = ops::cross_entropy(&logits, &labels, &CrossEntropyConfig::default())?;
    Ok(Loss::sum(all.sum, all.weight).with_sums(correct))
}

/// Returns the share of 1000 new texts that the model classifies correctly.
fn accuracy(model: &mut Model) -> Result<f64> {
    let texts = LabeledTexts::draw(Seed::new(5), 1000);
    let config = BatchConfig::default().with_max_batch_size(50);
    let mut n_correct = 0.0;
    for batch in DynamicBatchSampler::new(texts.lengths(), config)?.iter() {
        let batch = texts.collate(&batch?)?;
        let done = model.evaluate(batch, |_: &Replica, model, batch| loss(model, batch, None))?;
        n_correct += f64::from(done.aux.to_scalar::<f32>()?);
    }
    Ok(n_correct / 1000.0)
}
