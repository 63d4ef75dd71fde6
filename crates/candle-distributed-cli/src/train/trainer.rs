//! The training loop: a batch, a step of all devices, a line in the journal, now and then a checkpoint.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use candle_core::{DType, Device, Tensor};
use candle_distributed::{
    batch::BatchState,
    mesh::{ALL, DeviceMesh, P, Replica, Uneven},
    train::{AdamW, Checkpoint, Checkpoints, DataParallel},
};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder, VarMap};

use crate::{
    error::{Error, Result},
    train::{
        corpus::{Corpus, MAX_SEQUENCE_LENGTH},
        data::{self, Schedule},
        journal::Journal,
        metrics::StepMetrics,
        model::{Config, Transformer},
        run_dir,
    },
};

/// The model that is trained.
pub(crate) const MODEL: Config =
    Config { vocabulary: 256, context: MAX_SEQUENCE_LENGTH - 1, layers: 2, heads: 4, hidden: 128 };

const PEAK_LEARNING_RATE: f64 = 3e-3;
const WARMUP_STEPS: u64 = 10;

/// What is trained, on what, and for how long; the same in every process.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) mesh: &'a DeviceMesh,
    pub(crate) corpus: &'a Corpus,
    pub(crate) schedule: &'a Schedule,
    pub(crate) steps: u64,
    /// After how many steps the run is written to disk, again and again.
    pub(crate) checkpoint_every: u64,
    /// The folder of the run.
    pub(crate) path: &'a Path,
    /// Where to go on.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// Set from outside when the run is to stop after the step it is in.
    pub(crate) stop: Arc<AtomicBool>,
}

impl Job<'_> {
    /// Changes `vars` by the steps that are left, each over one batch that all devices share; the process that has the
    /// journal keeps it.
    pub(crate) fn run(&self, vars: &VarMap, mut journal: Option<Journal>) -> Result<()> {
        let build = |vb: VarBuilder<'_>| Transformer::new(MODEL, &vb);
        let adam = |vars| AdamW::new(vars, ParamsAdamW::default());
        let model = DataParallel::new(self.mesh, vars, build, adam)?;
        let mut model = model.in_axes(Some(0)).uneven(Uneven::Pad);
        let checkpoints = Checkpoints::new(run_dir::checkpoints(self.path));
        let mut state: Option<BatchState> = None;
        let first = self.checkpoint.as_ref().map_or(0, Checkpoint::step);
        if let Some(checkpoint) = &self.checkpoint {
            model.load(checkpoint)?;
            state = Some(checkpoint.state()?);
        }
        let start = Instant::now();
        for (step, scheduled) in (first..self.steps).zip(self.schedule.batches(state.as_ref())?) {
            let data::Scheduled { epoch, batch, state } = scheduled?;
            let learning_rate = learning_rate(step, self.steps);
            model.set_learning_rate(learning_rate);
            let loss = model.step(data::collate(&batch, self.corpus, &self.mesh.devices()[0])?, loss)?;
            let (loss, seconds) = (loss.to_scalar()?, start.elapsed().as_secs_f64());
            if let Some(journal) = &mut journal {
                journal.log(&StepMetrics::new(step, epoch, loss, learning_rate, &batch, seconds), &batch)?;
            }
            let (done, is_stopped) = (step + 1, largest(self.mesh, self.stop.load(Ordering::Relaxed).into())? > 0);
            if done == self.steps {
                break;
            }
            if is_stopped || done.is_multiple_of(self.checkpoint_every) {
                journal.as_ref().map_or(Ok(()), Journal::sync)?;
                checkpoints.save(self.mesh, done, &model.state_dict()?, &state)?;
            }
            if is_stopped {
                return Err(self.stopped(done, journal)?);
            }
        }
        journal.map_or(Ok(()), |mut journal| journal.finish(vars))
    }

    /// What is told when the run was stopped from outside.
    fn stopped(&self, done: u64, journal: Option<Journal>) -> Result<Error> {
        let Some(mut journal) = journal else { return Ok(Error::StoppedToo) };
        journal.pause()?;
        let hint = format!("to go on: candle-distributed train --out {} --resume", self.path.display());
        Ok(Error::Stopped { done, steps: self.steps }.hinted(hint))
    }
}

/// Whether all processes of a mesh have the same number.
pub(crate) fn agree(mesh: &DeviceMesh, number: u32) -> Result<bool> {
    Ok(largest(mesh, number)? == number && largest(mesh, !number)? == !number)
}

/// The largest of the numbers that the processes of a mesh have.
pub(crate) fn largest(mesh: &DeviceMesh, number: u32) -> Result<u32> {
    let agree =
        mesh.pmap(|ctx, number: Tensor| ctx.pmax(&number, ALL)).in_axes(P::replicate()).out_axes(P::replicate());
    let number = Tensor::full(number, (), &Device::Cpu)?.to_dtype(DType::U32)?;
    Ok(agree.call(number)?.to_scalar()?)
}

/// The loss of a shard, as if all had its mean: weights are shares in the whole batch's, however its tokens are spread.
fn loss(replica: &Replica, model: &Transformer, (ids, weights): (Tensor, Tensor)) -> candle_core::Result<Tensor> {
    // A shard that is padding alone has no weight, and no loss either.
    let share = if replica.weight() > 0.0 { replica.count() as f64 / replica.weight() } else { 1.0 };
    model.loss(&ids, &weights)? * share
}

/// Up in a line over the first steps, then down in a line to a tenth of the peak.
fn learning_rate(step: u64, steps: u64) -> f64 {
    let warmup = (step + 1) as f64 / WARMUP_STEPS as f64;
    let decay = 1.0 - 0.9 * step as f64 / steps as f64;
    PEAK_LEARNING_RATE * warmup.min(decay)
}
