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
    batch::{Batch, BatchState},
    mesh::{ALL, DeviceMesh, P, Replica, Uneven},
    train::{
        self, AdamW, CheckpointError, Checkpoints, DataParallel, GradientReport, Loss,
        TrainingError::{NonFiniteBuffer, NonFiniteLoss, NonFiniteNorm},
    },
};
use candle_nn::{Optimizer, ParamsAdamW, VarMap};

use crate::{
    error::{Error, ErrorKind, Result},
    train::{
        corpus::Corpus,
        data::{self, Schedule, Scheduled},
        journal::Journal,
        metrics::StepMetrics,
        model::{MODEL, Transformer},
        resumed::Resumed,
        settings::Settings,
    },
};

const PEAK_LEARNING_RATE: f64 = 3e-3;
const WARMUP_STEPS: u64 = 10;

pub(crate) type Model = DataParallel<Transformer, AdamW>;

/// The loss of a shard of token ids and weights.
type LossFn = fn(&Replica, &Transformer, (Tensor, Tensor)) -> candle_core::Result<Loss>;

/// What to train, on what, and for how long; the same in every process.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) mesh: &'a DeviceMesh,
    pub(crate) corpus: &'a Corpus,
    pub(crate) schedule: &'a Schedule,
    pub(crate) settings: &'a Settings,
    /// The number of steps from one checkpoint to the next.
    pub(crate) checkpoint_every: u64,
    /// Whether to check the gradients before the first step.
    pub(crate) check: bool,
    /// The folder of the run.
    pub(crate) path: &'a Path,
    pub(crate) checkpoints: &'a Checkpoints,
    /// Where to resume.
    pub(crate) from: Option<&'a Resumed>,
    /// Set from outside to stop the run after the current step.
    pub(crate) stop: Arc<AtomicBool>,
}

impl Job<'_> {
    /// The number of steps that are done when it starts.
    pub(crate) fn first_step(&self) -> u64 {
        self.from.map_or(0, |from| from.checkpoint.step())
    }

    /// The model with the parameters `vars`, as the checkpoint has them if there is one.
    pub(crate) fn start(&self, vars: &VarMap) -> Result<Model> {
        let mut model = self.model(vars)?;
        if let Some(from) = self.from {
            model.load(&from.checkpoint)?;
        }
        Ok(model)
    }

    /// Trains the model of `vars` for the remaining steps, each on one batch that all devices share.
    /// The process that has a journal writes it.
    pub(crate) fn run(
        &self,
        mut model: Model,
        vars: &VarMap,
        mut journal: Option<Journal>,
    ) -> Result<()> {
        let state = self.from.map(|from| &from.batches);
        if self.check {
            let report = self.check_gradients(&mut model, state, loss)?;
            if let Some(journal) = &journal {
                journal.show(&report);
            }
        }
        let first = self.first_step();
        let steps = self.settings.steps;
        let start = Instant::now();
        for (step, scheduled) in (first..steps).zip(self.schedule.batches(state)?) {
            let Scheduled { epoch, batch, state } = scheduled?;
            let learning_rate = learning_rate(step, steps);
            let at = At { step, epoch, batch: state.step, learning_rate };
            let loss = match self.step(&mut model, &batch, learning_rate) {
                Ok(loss) => loss,
                Err(error) => return Err(self.failed(error, &at, journal)?),
            };
            let seconds = start.elapsed().as_secs_f64();
            if let Some(journal) = &mut journal {
                let metrics = StepMetrics::new(step, epoch, loss, learning_rate, &batch, seconds);
                journal.log(&metrics, &batch)?;
            }
            let done = step + 1;
            let is_stopped = self.is_stopped()?;
            if done == steps {
                // The model itself is written now, which takes the place of a checkpoint.
                break;
            }
            if is_stopped || done.is_multiple_of(self.checkpoint_every) {
                if let Some(journal) = &journal {
                    journal.sync()?;
                }
                if let Err(error) = self.save(&model, done, &state) {
                    return Err(self.failed(error, &at, journal)?);
                }
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

    /// Trains on one batch, and returns its loss.
    #[expect(clippy::cast_possible_truncation, reason = "the journal is in single precision")]
    fn step(&self, model: &mut Model, batch: &Batch, learning_rate: f64) -> Result<f32> {
        model.set_learning_rate(learning_rate)?;
        let tensors = data::collate(batch, self.corpus, &self.mesh.devices()[0])?;
        Ok(model.step(tensors, loss)?.loss as f32)
    }

    /// Writes a checkpoint after `done` steps, of which `state` is the last.
    fn save(&self, model: &Model, done: u64, state: &BatchState) -> Result<()> {
        Ok(self.checkpoints.save(self.mesh, done, &model.state_dict()?, state)?)
    }

    fn model(&self, vars: &VarMap) -> Result<Model> {
        let mut builder = DataParallel::builder(self.mesh, |vb| Transformer::new(MODEL, &vb))
            .variables(vars)
            .uneven(Uneven::Pad);
        if self.settings.allow_non_finite {
            builder = builder.allow_non_finite();
        }
        Ok(builder.build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?)
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
        let path = self.path.display();
        let hint = format!("to resume: candle-distributed train --out {path} --resume");
        let stopped = ErrorKind::Stopped { done, steps: self.settings.steps };
        ended(journal, Error::from(stopped).hinted(hint))
    }

    /// The error of a run in which a step failed: if because of numbers that are not finite, it says
    /// where, and what is left.
    fn failed(&self, error: Error, at: &At, journal: Option<Journal>) -> Result<Error> {
        let source = match *error.kind {
            ErrorKind::Training(source) if is_not_finite(&source) => source,
            kind => return Ok(Error { kind: Box::new(kind), advice: error.advice }),
        };
        let last = match self.checkpoints.steps()?.last() {
            Some(step) => format!("the last checkpoint is that of step {step}"),
            None => "there is no checkpoint yet".into(),
        };
        let diverged = ErrorKind::Diverged {
            step: at.step + 1,
            steps: self.settings.steps,
            batch: at.batch,
            epoch: at.epoch,
            learning_rate: at.learning_rate,
            source,
        };
        let hint = format!(
            "{last}; the same steps end alike, so look at the gradients with --resume --check, try \
             another --seed, or train on with --resume --allow-non-finite"
        );
        ended(journal, Error::from(diverged).hinted(hint))
    }
}

/// A step that is under way.
struct At {
    step: u64,
    epoch: u64,
    /// The number of its batch in the epoch, from 1.
    batch: u64,
    learning_rate: f64,
}

/// Whether all processes end a step because of numbers that are infinite or none.
fn is_not_finite(error: &train::Error) -> bool {
    matches!(
        error,
        train::Error::Training(
            NonFiniteLoss { .. } | NonFiniteNorm { .. } | NonFiniteBuffer { .. }
        ) | train::Error::Checkpoint(CheckpointError::NotFinite { .. })
    )
}

/// The error that ends a run in all processes after the same step: the one with the journal closes
/// it and reports the error.
fn ended(journal: Option<Journal>, error: Error) -> Result<Error> {
    let Some(mut journal) = journal else {
        let exit_code = error.exit_code();
        return Ok(ErrorKind::SaidByFirst { exit_code, is_of_all: true }.into());
    };
    journal.pause()?;
    Ok(error)
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
    use candle_distributed::{train::GradientError, types::Seed};

    use super::*;
    use crate::train::{parameters, run_dir, settings::tests::settings, sharding::Needs};

    #[test]
    fn a_wrong_gradient_ends_the_check_with_a_hint() {
        let mesh = DeviceMesh::cpu(2).unwrap();
        let corpus = Corpus::new(["to be or\n\nnot to be"]);
        let schedule = Schedule::new(&corpus, Seed::new(0), 64).unwrap();
        let job = Job {
            mesh: &mesh,
            corpus: &corpus,
            schedule: &schedule,
            settings: &settings(),
            checkpoint_every: 1,
            check: true,
            path: Path::new(""),
            checkpoints: &Checkpoints::new(""),
            from: None,
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

    /// Trains a model with a parameter that is no number, until the run ends.
    fn run_on_nan(settings: &Settings, path: &Path, journal: Option<Journal>) -> Result<()> {
        let mesh = DeviceMesh::cpu(2).unwrap();
        let corpus = Corpus::new(["to be or\n\nnot to be"]);
        let schedule = Schedule::new(&corpus, Seed::new(0), 64).unwrap();
        let job = Job {
            mesh: &mesh,
            corpus: &corpus,
            schedule: &schedule,
            settings,
            checkpoint_every: 5,
            check: false,
            path,
            checkpoints: &run_dir::checkpoints(path, settings),
            from: None,
            stop: Arc::default(),
        };
        let build = |vb: candle_nn::VarBuilder<'_>| Transformer::new(MODEL, &vb);
        let vars = parameters::initialized(Seed::new(0), &Device::Cpu, build).unwrap();
        let norm = &parameters::by_name(&vars).unwrap()["norm.weight"];
        norm.set(&Tensor::full(f32::NAN, norm.shape(), &Device::Cpu).unwrap()).unwrap();
        let model = job.start(&vars).unwrap();
        job.run(model, &vars, journal)
    }

    #[test]
    fn a_loss_that_is_no_number_ends_the_run_where_it_is() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("run");
        let settings = settings();
        let journal = || {
            let run_dir = run_dir::RunDir::create(&path, &settings).unwrap();
            Journal::new(0, settings.steps, run_dir, Needs { whole_bytes: 1, sharded_bytes: 1 })
        };
        let error = run_on_nan(&settings, &path, Some(journal())).unwrap_err();
        assert!(error.is_of_all() && error.exit_code() == 1, "{error}");
        let words = "step 1 of 20 failed on batch 1 of epoch 0 with learning rate 0.0003";
        let said = error.chain();
        assert!(said.starts_with(words) && said.ends_with(": the loss of slot 0 is NaN"), "{said}");
        let hint = error.hint().unwrap();
        assert!(
            hint.contains("no checkpoint yet") && hint.contains("--allow-non-finite"),
            "{hint}"
        );
        assert_eq!(run_dir::metrics(&path).unwrap().done(), 0);

        // The other processes end without a word, with the same exit code.
        let error = run_on_nan(&settings, &path, None).unwrap_err();
        let is_silent =
            matches!(*error.kind, ErrorKind::SaidByFirst { exit_code: 1, is_of_all: true });
        assert!(is_silent, "{error}");
    }

    #[test]
    fn a_run_may_be_told_to_go_on_without_numbers() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("run");
        let settings = Settings { allow_non_finite: true, steps: 2, ..settings() };
        let run_dir = run_dir::RunDir::create(&path, &settings).unwrap();
        let needs = Needs { whole_bytes: 1, sharded_bytes: 1 };
        let journal = Journal::new(0, settings.steps, run_dir, needs);
        run_on_nan(&settings, &path, Some(journal)).unwrap();
        assert_eq!(run_dir::metrics(&path).unwrap().done(), 2);
        assert!(run_dir::metrics(&path).unwrap().steps()[1].loss.is_nan());
    }
}
