//! The training loop: a batch, a step of all devices, a line in the journal.

use std::time::Instant;

use candle_core::Tensor;
use candle_distributed::mesh::{DataParallel, DeviceMesh, Replica};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};

use crate::{
    error::Result,
    train::{
        corpus::{Corpus, MAX_SEQUENCE_LENGTH},
        data::{self, Schedule},
        journal::{Journal, StepMetrics},
        model::{Config, Transformer},
    },
};

/// The model that is trained.
pub(crate) const MODEL: Config =
    Config { vocabulary: 256, context: MAX_SEQUENCE_LENGTH - 1, layers: 2, heads: 4, hidden: 128 };

const PEAK_LEARNING_RATE: f64 = 3e-3;
const WARMUP_STEPS: u64 = 10;

/// Changes `vars` by `steps` optimizer steps, each over one batch that all devices of `mesh` share; the
/// process that has the journal keeps it.
pub(crate) fn train(
    mesh: &DeviceMesh,
    vars: &VarMap,
    corpus: &Corpus,
    schedule: Schedule,
    steps: u64,
    mut journal: Option<Journal>,
) -> Result<()> {
    let build = |vb: VarBuilder<'_>| Transformer::new(MODEL, &vb);
    let adam = |vars| AdamW::new(vars, ParamsAdamW::default());
    let mut model = DataParallel::new(mesh, vars, build, adam)?.in_axes(Some(0));
    let start = Instant::now();
    for (step, batch) in (0..steps).zip(schedule.batches()) {
        let (epoch, batch) = batch?;
        let learning_rate = learning_rate(step, steps);
        model.set_learning_rate(learning_rate);
        let loss = model.step(data::collate(&batch, corpus, &mesh.devices()[0])?, loss)?;
        let (loss, seconds) = (loss.to_scalar()?, start.elapsed().as_secs_f64());
        if let Some(journal) = &mut journal {
            journal.log(&StepMetrics::new(step, epoch, loss, learning_rate, &batch, seconds), &batch)?;
        }
    }
    journal.map_or(Ok(()), |journal| journal.finish(vars))
}

/// The loss of a shard, as if all had its mean: weights are shares in the whole batch's, however its tokens are spread.
fn loss(replica: &Replica, model: &Transformer, (ids, weights): (Tensor, Tensor)) -> candle_core::Result<Tensor> {
    model.loss(&ids, &weights)? * (replica.count() as f64 / replica.weight())
}

/// Up in a line over the first steps, then down in a line to a tenth of the peak.
fn learning_rate(step: u64, steps: u64) -> f64 {
    let warmup = (step + 1) as f64 / WARMUP_STEPS as f64;
    let decay = 1.0 - 0.9 * step as f64 / steps as f64;
    PEAK_LEARNING_RATE * warmup.min(decay)
}
