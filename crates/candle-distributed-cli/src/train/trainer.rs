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
    finetune::{
        self, Folder,
        cost::{Sharding, StepTraffic},
        data::{BatchSchedule, BatchTensors, DataSet, ScheduledStep},
        run::{self, ResumePoint, ValidationSet, best_validation, validations},
        spec::Spec,
    },
    mesh::{ALL, DeviceMesh, P},
    train::{
        self, CheckpointError, Checkpoints, Step, StepMetrics,
        TrainingError::{NonFiniteBuffer, NonFiniteLoss, NonFiniteNorm},
    },
    types::files::AtomicFolder,
};

use crate::{
    error::{Error, ErrorKind, Result},
    hint,
    train::{distributed::Distributed, journal::Journal, products::Products},
};

/// What to train, on what, and for how long; the same in every process.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) mesh: &'a DeviceMesh,
    /// Threads that make batches share it.
    pub(crate) data: &'a Arc<DataSet>,
    pub(crate) schedule: &'a BatchSchedule,
    /// Examples by which it is seen how much was learnt.
    pub(crate) held_out: Option<&'a ValidationSet>,
    /// The folder of the model.
    pub(crate) folder: &'a Folder,
    pub(crate) settings: &'a Spec,
    /// How the model is sharded; every device has all of it if there is nothing here.
    pub(crate) sharding: Option<&'a Sharding>,
    /// What a resumed run is to be typed with again, beside its folder.
    pub(crate) typed: &'a str,
    /// The number of steps from one checkpoint to the next.
    pub(crate) checkpoint_every: u64,
    /// Whether to check the gradients before the first step.
    pub(crate) check: bool,
    /// The folder of the run.
    pub(crate) path: &'a Path,
    pub(crate) checkpoints: &'a Checkpoints,
    /// Where to resume.
    pub(crate) from: Option<&'a ResumePoint>,
    /// Set from outside to stop the run after the current step.
    pub(crate) stop: Arc<AtomicBool>,
}

impl Job<'_> {
    /// The number of steps that are done when it starts.
    pub(crate) fn first_step(&self) -> u64 {
        self.from.map_or(0, |from| from.checkpoint.step())
    }

    /// The model, as the checkpoint has it if there is one.
    pub(crate) fn start(&self) -> Result<Distributed> {
        let mut model = Distributed::new(self.mesh, self.settings, self.sharding)?;
        if let Some(from) = self.from {
            model.trained.load(&from.checkpoint)?;
        }
        Ok(model)
    }

    /// Trains the model for the remaining steps, each on one batch that all devices share. The
    /// process that has a journal writes it.
    pub(crate) fn run(&self, mut model: Distributed, mut journal: Option<Journal>) -> Result<()> {
        let state = self.from.map(|from| &from.batches);
        if self.check {
            let report = model.check(self.next_batch(state)?)?;
            if let Some(journal) = &journal {
                journal.show(&report);
            }
        }
        let first = self.first_step();
        let steps = self.settings.steps;
        let mut best = self.best_before(first)?;
        let start = Instant::now();
        for (step, made) in (first..steps).zip(self.batches(state)?) {
            let Made { scheduled: ScheduledStep { epoch, batches, state, .. }, tensors } = made?;
            let learning_rate = self.settings.recipe.learning_rate(step, steps);
            let at = At { step, epoch, batch: state.step, learning_rate };
            let before = StepTraffic::so_far(self.mesh);
            let trained = match train_on(&mut model, tensors, learning_rate) {
                Ok(trained) => trained,
                Err(error) => return Err(self.failed(error, &at, journal)?),
            };
            let seconds = start.elapsed().as_secs_f64();
            if let Some(journal) = &mut journal {
                journal.set_step_traffic(StepTraffic::since(self.mesh, before));
                let metrics = StepMetrics::from_step(step, &trained).epoch(epoch);
                let metrics = counted(metrics.learning_rate(learning_rate), &batches);
                journal.log(&measured(metrics, seconds), &batches)?;
            }
            let done = step + 1;
            if let Err(error) = self.validate(&mut model, done, &mut best, &mut journal) {
                return Err(self.failed(error, &at, journal)?);
            }
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
        self.finish(&model, journal)
    }

    /// Trains two steps, and returns what the first device of this process sent in the second.
    pub(crate) fn rehearse(&self) -> Result<StepTraffic> {
        let mut model = self.start()?;
        let steps = self.settings.steps;
        let mut counted = StepTraffic::default();
        for (step, made) in (0..2).zip(self.batches(None)?) {
            let before = StepTraffic::so_far(self.mesh);
            let learning_rate = self.settings.recipe.learning_rate(step, steps);
            train_on(&mut model, made?.tensors, learning_rate)?;
            counted = StepTraffic::since(self.mesh, before);
        }
        Ok(counted)
    }

    /// The least loss that a validation has found before these steps.
    fn best_before(&self, steps: u64) -> Result<Option<f64>> {
        let found = validations(self.path, steps)?;
        Ok(best_validation(&found).map(|best| best.loss))
    }

    /// Tries the model on the examples that were held out, if that is due, and saves it if it did
    /// better than ever before.
    fn validate(
        &self,
        model: &mut Distributed,
        done: u64,
        best: &mut Option<f64>,
        journal: &mut Option<Journal>,
    ) -> Result<()> {
        let due = self.held_out.filter(|held_out| held_out.is_due(done, self.settings.steps));
        let Some(held_out) = due else { return Ok(()) };
        let found =
            held_out.validate(done, &self.mesh.devices()[0], |batch| model.evaluate(batch))?;
        let is_best = found.loss.is_finite() && best.is_none_or(|best| found.loss < best);
        if is_best {
            *best = Some(found.loss);
            self.products().save(model, &run::best_in(self.path))?;
        }
        match journal {
            Some(journal) => journal.log_validation(found, is_best),
            None => Ok(()),
        }
    }

    fn products(&self) -> Products<'_> {
        let is_first = self.mesh.is_first_process();
        Products { settings: self.settings, folder: self.folder, is_first }
    }

    /// Writes the folder of the model, of which each process may have a part.
    fn finish(&self, model: &Distributed, journal: Option<Journal>) -> Result<()> {
        let products = self.products();
        if let Some(lora) = model.model.lora().filter(|_| products.merges()) {
            products.save_adapters(model, lora, &run::adapter_in(self.path))?;
        }
        let target = run::product_of(self.path, self.settings);
        let made = if journal.is_some() {
            run::folder_beside(&target).map(Some).map_err(Error::from)
        } else {
            Ok(None)
        };
        let partial = self.mesh.all_ok(made)?;
        // Only the process with the journal writes there.
        products.save(model, partial.as_ref().map_or(&target, AtomicFolder::path))?;
        let (Some(mut journal), Some(partial)) = (journal, partial) else { return Ok(()) };
        journal.save(partial)?;
        journal.finish()
    }

    /// The batches after `state`, which a thread makes while steps run.
    fn batches(&self, state: Option<&BatchState>) -> Result<impl Iterator<Item = Result<Made>>> {
        let data = Arc::clone(self.data);
        let device = self.mesh.devices()[0].clone();
        let made = move |scheduled: finetune::Result<ScheduledStep>| {
            let scheduled = scheduled?;
            let tensors = data.collate(&scheduled.batches, &device)?;
            Ok(Made { scheduled, tensors })
        };
        Ok(train::feed(self.schedule.batches(state)?).collate(made)?)
    }

    /// Writes a checkpoint after `done` steps, of which `state` is the last.
    fn save(&self, model: &Distributed, done: u64, state: &BatchState) -> Result<()> {
        Ok(self.checkpoints.save(self.mesh, done, &model.trained.state_dict()?, state)?)
    }

    /// The tensors of the batch after `state`.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    fn next_batch(&self, state: Option<&BatchState>) -> Result<BatchTensors> {
        let next = self.batches(state)?.next();
        Ok(next.expect("batches end with an error")?.tensors)
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
        let path = hint::in_shell(self.path.display());
        let typed = self.typed;
        let hint = format!("to resume: candle-distributed train --out {path} --resume{typed}");
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
        let typed = self.typed;
        let hint = format!(
            "{last}; the same steps end alike, so look at the gradients with \
             --resume{typed} --check, try another --seed, or train on with \
             --resume{typed} --allow-non-finite"
        );
        ended(journal, Error::from(diverged).hinted(hint))
    }
}

/// Trains on one batch, and returns its loss.
///
/// The whole batch goes to the mesh, which splits it: one order and one list of batches, so neither
/// depends on the number of devices. A sampler per replica would make both depend on it.
fn train_on(model: &mut Distributed, tensors: BatchTensors, learning_rate: f64) -> Result<Step> {
    model.trained.set_learning_rate(learning_rate)?;
    model.step(tensors)
}

/// The numbers of a step with those of its batches.
fn counted(metrics: StepMetrics, batches: &[Batch]) -> StepMetrics {
    let sum = |of: fn(&Batch) -> u64| batches.iter().map(of).sum();
    let sequences = sum(|batch| batch.len() as u64);
    metrics.batch(sequences, sum(|batch| batch.real_tokens), sum(Batch::padded_tokens))
}

/// The numbers of a step with its time, from the start of the session, and the memory so far.
fn measured(mut metrics: StepMetrics, seconds: f64) -> StepMetrics {
    metrics.seconds = seconds;
    metrics.peak_bytes = train::peak_bytes();
    metrics
}

/// A batch with its tensors.
struct Made {
    scheduled: ScheduledStep,
    tensors: BatchTensors,
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

#[cfg(test)]
mod tests {
    use candle_distributed::{
        finetune::{
            Examples, Overlong,
            cost::ModelBytes,
            data::{Batching, Rows},
            models::Tokens,
        },
        mesh::Replica,
        train::{DataParallel, GradientError, Loss, Units},
        types::Seed,
    };
    use candle_nn::{Optimizer, ParamsAdamW};

    use super::*;
    use crate::train::built_in::tests::{inputs, spec};

    /// What the jobs of these tests have in common.
    struct Fixture {
        mesh: DeviceMesh,
        folder: Folder,
        data: Arc<DataSet>,
        schedule: BatchSchedule,
    }

    impl Fixture {
        fn new() -> Self {
            let folder = inputs().open_folder().unwrap();
            let texts = ["to be or", "not to be"].map(str::to_owned);
            let examples =
                Examples::from_texts(texts, folder.tokenizer(), 64, Overlong::Error).unwrap();
            let data = Arc::new(DataSet::new(examples, Rows::Padded, 2));
            let batching = Batching::bucketed(64);
            let schedule = BatchSchedule::new(data.lengths(), Seed::new(0), &batching).unwrap();
            Self { mesh: DeviceMesh::cpu(2).unwrap(), folder, data, schedule }
        }

        fn job<'a>(
            &'a self,
            settings: &'a Spec,
            path: &'a Path,
            checkpoints: &'a Checkpoints,
            sharding: Option<&'a Sharding>,
        ) -> Job<'a> {
            Job {
                mesh: &self.mesh,
                data: &self.data,
                schedule: &self.schedule,
                held_out: None,
                folder: &self.folder,
                settings,
                sharding,
                typed: "",
                checkpoint_every: 5,
                check: false,
                path,
                checkpoints,
                from: None,
                stop: Arc::default(),
            }
        }
    }

    #[test]
    fn a_wrong_gradient_ends_the_check_with_a_hint() {
        let fixture = Fixture::new();
        let (settings, checkpoints) = (spec(), Checkpoints::new(""));
        let full = Sharding::default();
        for sharding in [None, Some(&full)] {
            let job = fixture.job(&settings, Path::new(""), &checkpoints, sharding);
            let mut model = job.start().unwrap();
            let llama = settings.trained_model().unwrap().0;
            let half_without_backward = |_: &Replica, units: &Units, batch: BatchTensors| {
                let logits = llama.logits(units, &Tokens::rows(batch.ids.clone()))?;
                let sum = logits.tanh()?.sum_all()?;
                let weight = batch.ids.ones_like()?.to_dtype(DType::F32)?.sum_all()?;
                Ok(Loss::sum((&sum + sum.detach())?, weight))
            };
            let batch = job.next_batch(None).unwrap();
            let checked = model.trained.check_gradients(batch, half_without_backward);
            let error = Error::from(checked.unwrap_err());
            let ErrorKind::Training(train::Error::Gradient(GradientError::Wrong {
                wrong,
                prefixes,
            })) = &*error.kind
            else {
                panic!("{error}")
            };
            assert!(!wrong.is_empty() && wrong.len() <= *prefixes, "{error}");
            assert_eq!(error.exit_code(), 1);
            assert!(error.hint().unwrap().contains("--device cpu"));
        }
    }

    /// A model with a parameter that is no number.
    fn of_nan(fixture: &Fixture, settings: &Spec) -> Distributed {
        let model = settings.trained_model().unwrap();
        let declared = model.clone();
        let build = move |vb: candle_nn::VarBuilder<'_>| declared.declare(&vb);
        let values = |declared: &train::Declared, items: std::ops::Range<usize>| {
            let value = if declared.name == "model.norm.weight" { f32::NAN } else { 1.0 };
            Tensor::full(value, items.len(), &Device::Cpu)
        };
        let builder = DataParallel::builder(&fixture.mesh, build).by_units(model.units());
        let builder = builder.init_with(values).uneven(candle_distributed::mesh::Uneven::Pad);
        let builder = if settings.allow_non_finite { builder.allow_non_finite() } else { builder };
        let adam = |group: train::Group| train::AdamW::new(group.vars, ParamsAdamW::default());
        Distributed { model, trained: builder.build(adam).unwrap() }
    }

    /// Trains a model with a parameter that is no number, until the run ends.
    fn run_on_nan(settings: &Spec, path: &Path, journal: Option<Journal>) -> Result<()> {
        let fixture = Fixture::new();
        let checkpoints = run::checkpoints(path, settings);
        let job = fixture.job(settings, path, &checkpoints, None);
        job.run(of_nan(&fixture, settings), journal)
    }

    /// Nobody looks at these.
    const NEEDS: ModelBytes = ModelBytes { whole_bytes: 1, sharded_bytes: 1, is_sharded: false };

    #[test]
    fn a_loss_that_is_no_number_ends_the_run_where_it_is() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("run");
        let settings = spec();
        let journal = || {
            let run_dir = run::RunFolder::create(&path, &settings).unwrap();
            Journal::new(0, settings.steps, run_dir, NEEDS)
        };
        let error = run_on_nan(&settings, &path, Some(journal())).unwrap_err();
        assert!(error.is_of_all() && error.exit_code() == 1, "{error}");
        let words = "step 1 of 20 failed on batch 1 of epoch 0 with learning rate 0.003";
        let said = error.chain();
        assert!(said.starts_with(words) && said.ends_with(": the loss of slot 0 is NaN"), "{said}");
        let hint = error.hint().unwrap();
        assert!(
            hint.contains("no checkpoint yet") && hint.contains("--allow-non-finite"),
            "{hint}"
        );
        assert_eq!(run::metrics(&path).unwrap().done(), 0);

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
        let settings = Spec { allow_non_finite: true, steps: 2, ..spec() };
        let run_dir = run::RunFolder::create(&path, &settings).unwrap();
        let journal = Journal::new(0, settings.steps, run_dir, NEEDS);
        run_on_nan(&settings, &path, Some(journal)).unwrap();
        assert_eq!(run::metrics(&path).unwrap().done(), 2);
        assert!(run::metrics(&path).unwrap().steps()[1].loss.is_nan());
    }
}
