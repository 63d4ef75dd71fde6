//! The training loop: a batch, a step of all devices, a line in the journal, now and then a
//! checkpoint.

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
    train::{AdamW, Checkpoint, Checkpoints, DataParallel, GradientReport, Loss},
};
use candle_nn::{Optimizer, ParamsAdamW, VarMap};

use crate::{
    error::{Error, ErrorKind, Result},
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

type Model = DataParallel<Transformer, AdamW>;

/// The loss of a shard of token ids and weights.
type LossFn = fn(&Replica, &Transformer, (Tensor, Tensor)) -> candle_core::Result<Loss>;

/// What to train, on what, and for how long; the same in every process.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) mesh: &'a DeviceMesh,
    pub(crate) corpus: &'a Corpus,
    pub(crate) schedule: &'a Schedule,
    pub(crate) steps: u64,
    /// The number of steps from one checkpoint to the next.
    pub(crate) checkpoint_every: u64,
    /// Whether to check the gradients before the first step.
    pub(crate) check: bool,
    /// The folder of the run.
    pub(crate) path: &'a Path,
    /// Where to resume.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// Set from outside to stop the run after the current step.
    pub(crate) stop: Arc<AtomicBool>,
}

impl Job<'_> {
    /// Trains `vars` for the remaining steps, each on one batch that all devices share. The process
    /// that has a journal writes it.
    #[expect(clippy::cast_possible_truncation, reason = "the journal is in single precision")]
    pub(crate) fn run(&self, vars: &VarMap, mut journal: Option<Journal>) -> Result<()> {
        let mut model = self.model(vars)?;
        let checkpoints = Checkpoints::new(run_dir::checkpoints(self.path));
        let mut first = 0;
        let mut state: Option<BatchState> = None;
        if let Some(checkpoint) = &self.checkpoint {
            model.load(checkpoint)?;
            first = checkpoint.step();
            state = Some(checkpoint.state()?);
        }
        if self.check {
            let report = self.check_gradients(&mut model, state.as_ref(), loss)?;
            if let Some(journal) = &journal {
                journal.show(&report);
            }
        }
        let start = Instant::now();
        for (step, scheduled) in (first..self.steps).zip(self.schedule.batches(state.as_ref())?) {
            let data::Scheduled { epoch, batch, state } = scheduled?;
            let learning_rate = learning_rate(step, self.steps);
            model.set_learning_rate(learning_rate)?;
            let tensors = data::collate(&batch, self.corpus, &self.mesh.devices()[0])?;
            let loss = model.step(tensors, loss)?.loss as f32;
            let seconds = start.elapsed().as_secs_f64();
            if let Some(journal) = &mut journal {
                let metrics = StepMetrics::new(step, epoch, loss, learning_rate, &batch, seconds);
                journal.log(&metrics, &batch)?;
            }
            let done = step + 1;
            let is_stopped = self.is_stopped()?;
            if done == self.steps {
                // The model itself is written now, which takes the place of a checkpoint.
                break;
            }
            if is_stopped || done.is_multiple_of(self.checkpoint_every) {
                if let Some(journal) = &journal {
                    journal.sync()?;
                }
                checkpoints.save(self.mesh, done, &model.state_dict()?, &state)?;
            }
            if is_stopped {
                return Err(self.stopped(done, journal)?);
            }
        }
        match journal {
            Some(mut journal) => journal.finish(vars),
            None => Ok(()),
        }
    }

    fn model(&self, vars: &VarMap) -> Result<Model> {
        let model = DataParallel::builder(self.mesh, |vb| Transformer::new(MODEL, &vb))
            .variables(vars)
            .uneven(Uneven::Pad)
            .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?;
        Ok(model)
    }

    /// Compares the gradients of the batch after `state` with differences of its loss.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    fn check_gradients(
        &self,
        model: &mut Model,
        state: Option<&BatchState>,
        loss: LossFn,
    ) -> Result<GradientReport> {
        let next = self.schedule.batches(state)?.next();
        let batch = next.expect("batches are endless")?.batch;
        let tensors = data::collate(&batch, self.corpus, &self.mesh.devices()[0])?;
        Ok(model.check_gradients(tensors, loss)?)
    }

    /// Whether a process was told to stop. A signal may reach the processes in different steps, and
    /// all must stop after the same one, so they ask each other.
    fn is_stopped(&self) -> Result<bool> {
        // Relaxed: nothing else is read on the strength of the flag.
        let here = self.stop.load(Ordering::Relaxed);
        Ok(largest(self.mesh, here.into())? > 0)
    }

    /// The error of a run that was stopped from outside.
    fn stopped(&self, done: u64, journal: Option<Journal>) -> Result<Error> {
        let Some(mut journal) = journal else { return Ok(ErrorKind::StoppedToo.into()) };
        journal.pause()?;
        let hint =
            format!("to resume: candle-distributed train --out {} --resume", self.path.display());
        Ok(Error::from(ErrorKind::Stopped { done, steps: self.steps }).hinted(hint))
    }
}

/// Whether all processes of a mesh have the same number.
pub(crate) fn agree(mesh: &DeviceMesh, number: u32) -> Result<bool> {
    // The largest complement is that of the smallest number.
    Ok(largest(mesh, number)? == number && largest(mesh, !number)? == !number)
}

/// The largest number that any process of a mesh has.
pub(crate) fn largest(mesh: &DeviceMesh, number: u32) -> Result<u32> {
    let pmax = mesh.pmap(|ctx, number: Tensor| ctx.pmax(&number, ALL));
    let pmax = pmax.in_axes(P::replicate()).out_axes(P::replicate());
    let number = Tensor::full(number, (), &Device::Cpu)?.to_dtype(DType::U32)?;
    Ok(pmax.call(number)?.to_scalar()?)
}

/// The loss of a shard: a sum over its predictions, of which a shard may have more per row than
/// others.
fn loss(
    _: &Replica,
    model: &Transformer,
    (ids, weights): (Tensor, Tensor),
) -> candle_core::Result<Loss> {
    let predictions = weights.sum_all()?;
    Ok(Loss::sum(model.loss(&ids, &weights)?, predictions))
}

/// A linear warm-up over the first steps, then a linear decay to a tenth of the peak.
fn learning_rate(step: u64, steps: u64) -> f64 {
    let warmup = (step + 1) as f64 / WARMUP_STEPS as f64;
    let decay = 1.0 - 0.9 * step as f64 / steps as f64;
    PEAK_LEARNING_RATE * warmup.min(decay)
}

#[cfg(test)]
mod tests {
    use candle_distributed::{
        train::{self, GradientError},
        types::Seed,
    };

    use super::*;
    use crate::train::parameters;

    #[test]
    fn a_wrong_gradient_ends_the_check_with_a_hint() {
        let mesh = DeviceMesh::cpu(2).unwrap();
        let corpus = Corpus::new(["to be or\n\nnot to be"]);
        let schedule = Schedule::new(&corpus, Seed::new(0), 64).unwrap();
        let job = Job {
            mesh: &mesh,
            corpus: &corpus,
            schedule: &schedule,
            steps: 1,
            checkpoint_every: 1,
            check: true,
            path: Path::new(""),
            checkpoint: None,
            stop: Arc::default(),
        };
        let vars =
            parameters::initialized(Seed::new(0), &Device::Cpu, |vb| Transformer::new(MODEL, &vb));
        let mut model = job.model(&vars.unwrap()).unwrap();
        let half_without_backward: LossFn = |_, model, (ids, weights)| {
            let sum = model.loss(&ids, &weights)?;
            Ok(Loss::sum((&sum + sum.detach())?, weights.sum_all()?))
        };
        let error = job.check_gradients(&mut model, None, half_without_backward).unwrap_err();
        let ErrorKind::Training(train::Error::Gradient(GradientError::Wrong { wrong, prefixes })) =
            &*error.kind
        else {
            panic!("{error}")
        };
        assert_eq!((wrong.len(), *prefixes), (6, 6), "{error}");
        assert_eq!(error.exit_code(), 1);
        assert!(error.hint().unwrap().contains("--device cpu"));
    }
}
