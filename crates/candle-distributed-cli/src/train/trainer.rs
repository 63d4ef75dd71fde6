//! The training loop: shard a batch, add up gradients, step, log.

use std::time::Instant;

use candle_core::Tensor;
use candle_distributed::mesh::{ALL, DeviceMesh, P, Replica};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};

use crate::{
    error::Result,
    train::{
        corpus::{Corpus, MAX_SEQUENCE_LENGTH},
        data::{self, Schedule},
        journal::{Journal, StepMetrics},
        model::{Config, Transformer},
        parameters::Parameters,
    },
};

/// The model that is trained.
pub(crate) const MODEL: Config =
    Config { vocabulary: 256, context: MAX_SEQUENCE_LENGTH - 1, layers: 2, heads: 4, hidden: 128 };

const PEAK_LEARNING_RATE: f64 = 3e-3;
const WARMUP_STEPS: u64 = 10;

/// Changes `parameters` by `steps` optimizer steps, each over one batch that all devices of `mesh` share.
pub(crate) fn train(
    mesh: &DeviceMesh,
    parameters: &Parameters,
    corpus: &Corpus,
    schedule: Schedule,
    steps: u64,
    mut journal: Journal,
) -> Result<()> {
    let shared = parameters.clone();
    let gradients = mesh
        .pmap(move |replica, (ids, weights): (Tensor, Tensor)| gradients(&shared, replica, &ids, &weights))
        .in_axes(P::shard(0, ALL))
        .out_axes(P::sum(ALL));
    let mut optimizer = AdamW::new(parameters.vars(), ParamsAdamW::default())?;
    let start = Instant::now();
    for (step, batch) in (0..steps).zip(schedule.batches()) {
        let (epoch, batch) = batch?;
        let (gradients, loss) = gradients.call(data::collate(&batch, corpus, &mesh.devices()[0])?)?;
        let learning_rate = learning_rate(step, steps);
        optimizer.set_learning_rate(learning_rate);
        optimizer.step(&parameters.grad_store(gradients))?;
        let (loss, seconds) = (loss.to_scalar()?, start.elapsed().as_secs_f64());
        journal.log(&StepMetrics::new(step, epoch, loss, learning_rate, &batch, seconds), &batch)?;
    }
    journal.finish(parameters)
}

/// What one replica does: the gradients of its shard of the batch, and its part of the loss.
fn gradients(
    parameters: &Parameters,
    replica: &Replica,
    ids: &Tensor,
    weights: &Tensor,
) -> candle_core::Result<(Vec<Tensor>, Tensor)> {
    let model = Transformer::new(MODEL, &parameters.builder(replica.device()))?;
    let loss = model.loss(ids, weights)?;
    Ok((parameters.gradients(&loss.backward()?)?, loss))
}

/// Up in a line over the first steps, then down in a line to a tenth of the peak.
fn learning_rate(step: u64, steps: u64) -> f64 {
    let warmup = (step + 1) as f64 / WARMUP_STEPS as f64;
    let decay = 1.0 - 0.9 * step as f64 / steps as f64;
    PEAK_LEARNING_RATE * warmup.min(decay)
}
