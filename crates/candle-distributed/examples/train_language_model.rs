//! Trains a small language model on two devices. Each batch is split over the devices, and with
//! `--sharded` the model is as well.
//!
//! Interrupt it and start it again: it resumes in the middle of the epoch.
//!
//! ```sh
//! cargo run -p candle-distributed --features candle,ops,serde --example train_language_model -- run --sharded
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its progress")]
#![allow(clippy::needless_pass_by_value, reason = "models are built of builders by value")]
#![allow(clippy::cast_possible_truncation, reason = "the numbers are small")]

use std::{path::Path, process::ExitCode, sync::Arc};

use candle_core::{Device, Tensor};
use candle_distributed::{
    batch::{
        BatchConfig, BatchState, Collator, DistributedBatchSampler, DistributedConfig,
        DynamicBatchSampler, DynamicBatchStrategy, Step,
    },
    data::prefetch,
    mesh::{DeviceMesh, Replica, Uneven, init_threads},
    ops::{self, CrossEntropyConfig},
    sampler::{DistributedSampler, SamplerConfig},
    train::{
        AdamW, Checkpoints, DataParallel, DistributedModel, Group, Loss, MetricsLog, Schedule,
        StepMetrics, UnitRules, Units,
    },
    types::{Epoch, Placement, Seed},
};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, embedding, linear};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
pub(crate) type Model = DistributedModel<Units, AdamW>;
const STEPS: u64 = 120;
const RATE: f64 = 2e-2;
const TEXTS: u64 = 1024;
const VOCABULARY: usize = 61;
const HIDDEN: usize = 32;
const BLOCKS: usize = 2;

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
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let is_sharded = args.last().is_some_and(|arg| arg == "--sharded");
    args.truncate(1);
    let folder = args.pop().ok_or("usage: train_language_model FOLDER [--sharded]")?;
    let mesh = DeviceMesh::cpu(2)?; // two virtual devices; `DeviceMesh::cuda(2)` for two GPUs
    let mut model = model(&mesh, is_sharded)?;
    match train(&mesh, &mut model, folder.as_ref(), STEPS)? {
        Some(loss) => println!("loss {loss:.3} after {STEPS} steps"),
        None => println!("all {STEPS} steps were done before"),
    }
    Ok(())
}

/// Declares the parameters, like a constructor in plain candle.
fn layers(vb: VarBuilder<'_>) -> candle_core::Result<()> {
    embedding(VOCABULARY, HIDDEN, vb.pp("tokens"))?;
    for n in 0..BLOCKS {
        linear(HIDDEN, HIDDEN, vb.pp(format!("blocks.{n}")))?;
    }
    linear(HIDDEN, VOCABULARY, vb.pp("head")).map(drop)
}

pub(crate) fn model(mesh: &DeviceMesh, is_sharded: bool) -> Result<Model> {
    // Numbered blocks are units without a rule.
    let rules = UnitRules::new().unit("tokens", ["tokens"]).unit("head", ["head"]);
    let builder = DataParallel::builder(mesh, layers)
        .by_units(rules)
        .init(Seed::new(1))
        .clip_grad_norm(1.0)
        .schedule(schedule())
        .uneven(Uneven::Balanced);
    let builder = if is_sharded { builder.fully_shard() } else { builder };
    Ok(builder.build(|group: Group| {
        AdamW::new(group.vars, ParamsAdamW { lr: RATE, ..ParamsAdamW::default() })
    })?)
}

fn schedule() -> Schedule {
    Schedule::cosine(STEPS).warmup(10)
}

/// Computes the loss of token ids and labels [texts, length]; each token predicts the next.
fn loss(_: &Replica, model: &Units, batch: (Tensor, Tensor)) -> candle_core::Result<Loss> {
    let (ids, labels) = batch;
    let mut x = model
        .unit("tokens", &ids, |vb, ids: &Tensor| embedding(VOCABULARY, HIDDEN, vb)?.forward(ids))?;
    for n in 0..BLOCKS {
        x = model.unit(&format!("blocks.{n}"), &x, |vb, x: &Tensor| {
            x + linear(HIDDEN, HIDDEN, vb)?.forward(x)?.gelu()?
        })?;
    }
    let logits =
        model.unit("head", &x, |vb, x: &Tensor| linear(HIDDEN, VOCABULARY, vb)?.forward(x))?;
    let predicted = ids.dim(1)? - 1;
    let logits = logits.narrow(1, 0, predicted)?;
    let labels = labels.narrow(1, 1, predicted)?;
    let config = CrossEntropyConfig::default().with_ignore_index(-100);
    let all = ops::cross_entropy(&logits, &labels, &config)?;
    Ok(Loss::sum(all.sum, all.weight))
}

/// Trains up to step `last` from the newest checkpoint, or from the start. Returns the last loss,
/// or `None` if no step was left.
pub(crate) fn train(
    mesh: &DeviceMesh,
    model: &mut Model,
    folder: &Path,
    last: u64,
) -> Result<Option<f64>> {
    let texts: Arc<Vec<Vec<u32>>> = Arc::new((0..TEXTS).map(text).collect());
    let lengths: Vec<usize> = texts.iter().map(Vec::len).collect();
    let collate = move |(mut step, state): (Step, BatchState)| {
        let batch = step.micro_batches.remove(0); // without accumulation, the only one
        let padded = Collator::default().pad(&batch, |n| &texts[n as usize][..], &Device::Cpu)?;
        Ok::<_, candle_core::Error>((batch, (padded.ids, padded.labels), state))
    };
    let mut order = DistributedSampler::new(TEXTS, Placement::SINGLE, SamplerConfig::default())?;
    let config = BatchConfig::default().with_strategy(DynamicBatchStrategy::Dynamic);
    let batches = DynamicBatchSampler::new(lengths, config.with_max_tokens(1024))?;
    let config = DistributedConfig { shuffle: Some(Seed::new(2)), ..DistributedConfig::default() };
    let batches = DistributedBatchSampler::new(batches, Placement::SINGLE, config)?;

    let checkpoints = Checkpoints::new(folder);
    let mut steps = batches.epoch(Epoch::ZERO, &order)?;
    if let Some(checkpoint) = checkpoints.latest()? {
        model.load(&checkpoint)?;
        let state: BatchState = checkpoint.state()?;
        order.set_epoch(state.epoch);
        steps = batches.resume(&state, &order)?;
    }
    let mut log = MetricsLog::open(folder.join("metrics.jsonl"), model.steps())?;
    while model.steps() < last {
        for item in prefetch(steps.with_states()).threads(1).map(collate.clone())? {
            let (batch, tensors, state) = item?;
            let done = model.step(tensors, loss)?;
            let metrics = StepMetrics::from_step(model.steps() - 1, &done);
            let metrics = metrics.epoch(state.epoch.as_u64());
            let sequences = batch.len() as u64;
            log.write(metrics.batch(sequences, batch.real_tokens, batch.padded_tokens()))?;
            if model.steps().is_multiple_of(20) {
                log.sync()?;
                checkpoints.save(mesh, model.steps(), &model.state_dict()?, &state)?;
            }
            if model.steps() == last {
                return Ok(Some(done.loss));
            }
        }
        order.set_epoch(Epoch::new(order.epoch().as_u64() + 1));
        steps = batches.epoch(order.epoch(), &order)?;
    }
    Ok(None)
}

/// Returns a text of 8 to 39 tokens; each token determines the next.
fn text(n: u64) -> Vec<u32> {
    let seed = Seed::new(3).derive(n).as_u64();
    let mut token = (seed >> 32) as u32 % VOCABULARY as u32;
    let mut text = vec![token];
    for _ in 0..7 + seed % 32 {
        token = (7 * token + 5) % VOCABULARY as u32;
        text.push(token);
    }
    text
}
