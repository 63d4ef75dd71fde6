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
    train::{AdamW, Checkpoints, DataParallel, GradientReport, Loss},
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
        position::{Position, Resumed},
        run_dir,
        settings::Settings,
    },
};

/// The model that is trained.
pub(crate) const MODEL: Config =
    Config { vocabulary: 256, context: MAX_SEQUENCE_LENGTH - 1, layers: 2, heads: 4, hidden: 128 };

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
    #[expect(clippy::cast_possible_truncation, reason = "the journal is in single precision")]
    pub(crate) fn run(
        &self,
        mut model: Model,
        vars: &VarMap,
        mut journal: Option<Journal>,
    ) -> Result<()> {
        let checkpoints = Checkpoints::new(run_dir::checkpoints(self.path));
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
            let data::Scheduled { epoch, batch, state } = scheduled?;
            let learning_rate = learning_rate(step, steps);
            model.set_learning_rate(learning_rate)?;
            let tensors = data::collate(&batch, self.corpus, &self.mesh.devices()[0])?;
            let loss = model.step(tensors, loss)?.loss as f32;
            let seconds = start.elapsed().as_secs_f64();
            let metrics = StepMetrics::new(step, epoch, loss, learning_rate, &batch, seconds);
            if let Some(journal) = &mut journal {
                journal.log(&metrics, &batch)?;
            }
            if !loss.is_finite() && !self.settings.allow_non_finite {
                return Err(self.not_finite(&metrics, &state, journal)?);
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
                let position = Position { run: self.settings.identity(), batches: state };
                checkpoints.save(self.mesh, done, &model.state_dict()?, &position)?;
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
        let path = self.path.display();
        let hint = format!("to resume: candle-distributed train --out {path} --resume");
        let stopped = ErrorKind::Stopped { done, steps: self.settings.steps };
        ended(journal, Error::from(stopped).hinted(hint))
    }

    /// The error of a run whose loss is no number, after the step that these metrics are of.
    fn not_finite(
        &self,
        metrics: &StepMetrics,
        state: &BatchState,
        journal: Option<Journal>,
    ) -> Result<Error> {
        let last = match Checkpoints::new(run_dir::checkpoints(self.path)).steps()?.last() {
            Some(step) => format!("the last checkpoint is that of step {step}"),
            None => "there is no checkpoint yet".into(),
        };
        let not_finite = ErrorKind::NotFinite {
            step: metrics.step + 1,
            steps: self.settings.steps,
            loss: metrics.loss,
            batch: state.step,
            epoch: metrics.epoch,
            learning_rate: metrics.learning_rate,
        };
        let hint = format!(
            "{last}; the same steps end alike, so look at the gradients with --resume --check, try \
             another --seed, or train on with --resume --allow-non-finite"
        );
        ended(journal, Error::from(not_finite).hinted(hint))
    }
}

/// The error that ends a run in all processes after the same step: the one with the journal closes
/// it and reports the error.
fn ended(journal: Option<Journal>, error: Error) -> Result<Error> {
    match journal {
        Some(mut journal) => journal.pause().map(|()| error),
        None => {
            let exit_code = error.exit_code();
            Ok(ErrorKind::SaidByFirst { exit_code, is_of_all: true }.into())
        }
    }
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
    use crate::train::{parameters, settings::tests::settings, sharding::Needs};

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
    fn end_of_a_run_on_nan(settings: &Settings, path: &Path, journal: Option<Journal>) -> Error {
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
            from: None,
            stop: Arc::default(),
        };
        let build = |vb: candle_nn::VarBuilder<'_>| Transformer::new(MODEL, &vb);
        let vars = parameters::initialized(Seed::new(0), &Device::Cpu, build).unwrap();
        let norm = &parameters::by_name(&vars).unwrap()["norm.weight"];
        norm.set(&Tensor::full(f32::NAN, norm.shape(), &Device::Cpu).unwrap()).unwrap();
        let model = job.start(&vars).unwrap();
        job.run(model, &vars, journal).unwrap_err()
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
        let error = end_of_a_run_on_nan(&settings, &path, Some(journal()));
        assert!(error.is_of_all() && error.exit_code() == 1, "{error}");
        let words = "the loss of step 1 of 20 is NaN: batch 1 of epoch 0, learning rate 0.0003";
        assert_eq!(error.to_string().replace("00000000000000003", "3"), words);
        let hint = error.hint().unwrap();
        assert!(
            hint.contains("no checkpoint yet") && hint.contains("--allow-non-finite"),
            "{hint}"
        );
        assert_eq!(run_dir::metrics(&path).unwrap().done(), 1);

        // The other processes end without a word, with the same exit code.
        let error = end_of_a_run_on_nan(&settings, &path, None);
        let is_silent =
            matches!(*error.kind, ErrorKind::SaidByFirst { exit_code: 1, is_of_all: true });
        assert!(is_silent, "{error}");
    }
}
