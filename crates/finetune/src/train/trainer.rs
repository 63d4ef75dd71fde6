//! The training loop: a step of all devices, then a validation and a checkpoint when they are due.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use candle_core::Device;
use core_types::files::AtomicFolder;
use dist_checkpoint::{Checkpoints, Error as CheckpointError};
use dist_train::{
    GradientReport, StepMetrics,
    TrainingError::{NonFiniteBuffer, NonFiniteLoss, NonFiniteNorm},
    peak_bytes,
};
use dyn_batch::{Batch, BatchState};
use pmap_mesh::DeviceMesh;

use crate::{
    cost::traffic::StepTraffic,
    data::schedule::ScheduledStep,
    error::{Error, Result, run::RunError},
    run::{
        folder::{RunFolder, adapter_in, best_in, checkpoints, folder_beside, product_of},
        validations::{ValidationPoint, best_validation, validations},
    },
    spec::session::Session,
    train::{
        model::TrainedModel,
        prepare::{PreparedRun, StepBatch},
        products::Products,
        shared,
    },
};

/// A run that is trained: an iterator of its [`Event`]s.
///
/// A call of `next` trains one step, validates, or writes a checkpoint or the model. Where the mesh
/// spans several processes, each of them must iterate. The first process writes the folder of the
/// run. The iterator ends after [`Event::Finished`], [`Event::Stopped`] or an error; a run that is
/// dropped before that resumes from its last checkpoint.
///
/// # Determinism
///
/// Parameters after each step follow from the options and the texts alone. They do not depend on
/// the number of resumptions.
pub struct Trainer {
    mesh: DeviceMesh,
    run: PreparedRun,
    path: PathBuf,
    checkpoints: Checkpoints,
    model: TrainedModel,
    /// Folder of the run, in the first process.
    folder: Option<RunFolder>,
    batches: Option<Box<dyn Iterator<Item = Result<StepBatch>>>>,
    /// Least loss of a validation so far.
    best_loss: Option<f64>,
    /// Whether a stop interrupted the validation after the last step. The resumed run validates
    /// before it trains.
    owes_validation: bool,
    phase: Phase,
    /// Number of steps done.
    done: u64,
    /// The step that was last begun.
    step: Option<StepPosition>,
    started: Option<Instant>,
    stop: Arc<AtomicBool>,
}

/// A part of a run, in the order of their occurrence.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A step was trained.
    Step {
        /// Numbers of the step, as in `metrics.jsonl`.
        metrics: StepMetrics,
        /// Its batches.
        batches: Vec<Batch>,
    },
    /// The model was validated on the examples that are held out.
    Validated {
        /// Result of the validation.
        point: ValidationPoint,
        /// Whether its loss is the least so far. The model is then saved in the folder `best`.
        is_best: bool,
    },
    /// A checkpoint was written.
    Saved {
        /// Number of steps before it.
        step: u64,
    },
    /// A process asked to stop, and a checkpoint was written; this is the last event.
    Stopped {
        /// Number of steps before it.
        step: u64,
    },
    /// The model was written; this is the last event.
    Finished,
}

/// The work of the next call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Opening,
    Step,
    Validation,
    Checkpoint,
    Ended,
}

/// The position of a step in its run.
#[derive(Debug)]
struct StepPosition {
    epoch: u64,
    learning_rate: f64,
    /// Position in the batches after the step.
    state: BatchState,
}

impl Trainer {
    /// Builds the model on the devices of a mesh, and locks the folder of the run, which first changes
    /// when the iterator is advanced.
    ///
    /// # Errors
    ///
    /// [`RunError::NotShared`] or [`RunError::ChangedWhileRead`]; the errors of building a model, of
    /// [`Checkpoints::lock`].
    pub fn new(mesh: &DeviceMesh, run: PreparedRun) -> Result<Self> {
        let path = match &run.out {
            Some(out) => out.clone(),
            None => shared::claim_folder(mesh)?,
        };
        shared::check_shared(mesh, &path)?;
        let checkpoints = checkpoints(&path, &run.spec);
        let mut model = TrainedModel::new(mesh, &run.spec, run.sharding.as_ref())?;
        if let Some(point) = &run.resume_point {
            model.trained.load(&point.checkpoint)?;
        }
        checkpoints.lock(mesh)?;
        // The lock needs the mesh, which comes after the run is read: from here on no other program
        // changes the run.
        shared::check_unchanged(mesh, &path, run.snapshot.as_ref())?;
        Ok(Self {
            mesh: mesh.clone(),
            done: run.first_step(),
            run,
            path,
            checkpoints,
            model,
            folder: None,
            batches: None,
            best_loss: None,
            owes_validation: false,
            phase: Phase::Opening,
            step: None,
            started: None,
            stop: Arc::default(),
        })
    }

    /// Sets a flag with which another thread, or a signal, stops the run after the current step. The
    /// flag of one process stops all.
    #[must_use]
    pub fn stop_on(self, stop: Arc<AtomicBool>) -> Self {
        Self { stop, ..self }
    }

    /// Returns the folder of the run.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the run.
    pub fn run(&self) -> &PreparedRun {
        &self.run
    }

    /// Returns this session in the first process once the run has begun, and `None` in others.
    pub fn session(&self) -> Option<&Session> {
        self.folder.as_ref().map(RunFolder::session)
    }

    /// Compares the gradients of the next batch with differences of its loss.
    ///
    /// # Errors
    ///
    /// As of [`DistributedModel::check_gradients`](dist_train::DistributedModel::check_gradients).
    pub fn check(&mut self) -> Result<GradientReport> {
        let mut batches = self.run.batches(&self.mesh.devices()[0], self.run.position())?;
        let Some(batch) = batches.next() else { return Err(RunError::LastEpoch.into()) };
        let mut tensors = batch?.tensors;
        self.model.check(tensors.swap_remove(0))
    }

    fn advance(&mut self) -> Result<Option<Event>> {
        match self.phase {
            Phase::Opening => {
                self.open()?;
                self.phase = if self.owes_validation { Phase::Validation } else { Phase::Step };
                Ok(None)
            }
            Phase::Step if self.done == self.run.spec.steps => {
                self.phase = Phase::Ended;
                self.step = None;
                self.finish()?;
                Ok(Some(Event::Finished))
            }
            Phase::Step => {
                self.phase = Phase::Validation;
                self.train().map(Some)
            }
            Phase::Validation => {
                self.phase = Phase::Checkpoint;
                self.validate()
            }
            Phase::Checkpoint => {
                self.phase = Phase::Step;
                self.save()
            }
            Phase::Ended => Ok(None),
        }
    }

    /// Opens the folder of the run for a session on the devices of the mesh.
    fn open(&mut self) -> Result<()> {
        let opened = self.mesh.is_first_process().then(|| self.run_folder()).transpose();
        self.folder = self.mesh.all_ok(opened)?;
        let found = validations(&self.path, self.done)?;
        self.best_loss = best_validation(&found).map(|best| best.loss);
        let is_missing = found.last().is_none_or(|last| last.step < self.done);
        self.owes_validation =
            self.done > 0 && is_missing && self.run.due_validation(self.done).is_some();
        self.started = Some(Instant::now());
        Ok(())
    }

    fn run_folder(&self) -> Result<RunFolder> {
        let devices = self.mesh.devices();
        let session = Session {
            first_step: self.done,
            world_size: self.mesh.len() as u64,
            devices_here: devices.len() as u64,
            on_processors: devices.iter().all(Device::is_cpu),
            sharding: self.run.sharding.clone(),
            base_bytes: self.run.base_bytes,
            step_traffic: None,
            peak_bytes: None,
        };
        let spec = self.run.spec.clone().with_session(session);
        if self.run.is_resumed {
            RunFolder::resume(&self.path, &spec, self.done)
        } else {
            RunFolder::create(&self.path, &spec)
        }
    }

    /// Trains one step, and appends its numbers to the metrics.
    fn train(&mut self) -> Result<Event> {
        let StepBatch { scheduled, tensors } = self.next_batch()?;
        let ScheduledStep { epoch, micro_batches, state } = scheduled;
        let batches = micro_batches.concat();
        let learning_rate = self.run.spec.recipe.learning_rate(self.done, self.run.spec.steps);
        self.step = Some(StepPosition { epoch, learning_rate, state });
        let before = StepTraffic::so_far(&self.mesh);
        let trained = self.model.step(tensors, learning_rate)?;
        let metrics = StepMetrics::from_step(self.done, &trained).epoch(epoch);
        let mut metrics = with_tokens(metrics, &batches);
        metrics.learning_rate = Some(learning_rate);
        metrics.seconds = self.started.map_or(0., |started| started.elapsed().as_secs_f64());
        metrics.peak_bytes = peak_bytes();
        if let Some(folder) = &mut self.folder {
            folder.set_step_traffic(StepTraffic::since(&self.mesh, before));
            folder.append(&metrics)?;
        }
        self.done += 1;
        Ok(Event::Step { metrics, batches })
    }

    fn next_batch(&mut self) -> Result<StepBatch> {
        let batches = match &mut self.batches {
            Some(batches) => batches,
            none => {
                let device = &self.mesh.devices()[0];
                none.insert(Box::new(self.run.batches(device, self.run.position())?))
            }
        };
        batches.next().unwrap_or_else(|| Err(RunError::LastEpoch.into()))
    }

    /// Validates the model if that is due, and saves it if its loss is the least so far. A stop
    /// interrupts the validation.
    fn validate(&mut self) -> Result<Option<Event>> {
        let Some(validation) = self.run.due_validation(self.done) else { return Ok(None) };
        let device = &self.mesh.devices()[0];
        let (model, stop) = (&mut self.model, &self.stop);
        let point = validation.validate(self.done, device, |batch| {
            if is_stopped(&self.mesh, stop)? { Ok(None) } else { model.evaluate(batch).map(Some) }
        })?;
        self.owes_validation = point.is_none();
        let Some(point) = point else { return Ok(None) };
        let is_best = point.loss.is_finite() && self.best_loss.is_none_or(|best| point.loss < best);
        if is_best {
            self.best_loss = Some(point.loss);
            self.replace_folder(&best_in(&self.path), |to| self.products().save(&self.model, to))?;
        }
        if let Some(folder) = &self.folder {
            folder.append_validation(point)?;
        }
        Ok(Some(Event::Validated { point, is_best }))
    }

    /// Writes a checkpoint if one is due, or if a process is asked to stop.
    fn save(&mut self) -> Result<Option<Event>> {
        let step = self.done;
        let is_stopped = self.owes_validation || is_stopped(&self.mesh, &self.stop)?;
        // The model itself is about to be written, which takes the place of a checkpoint.
        if step == self.run.spec.steps && !self.owes_validation {
            return Ok(None);
        }
        // There is no step yet if a resumed run has only validated.
        let is_due = self.step.is_some() && step.is_multiple_of(self.run.checkpoint_every);
        if !is_stopped && !is_due {
            return Ok(None);
        }
        if let Some(folder) = &self.folder {
            folder.sync()?;
        }
        if let Some(StepPosition { state, .. }) = &self.step {
            self.checkpoints.save(&self.mesh, step, &self.model.trained.state_dict()?, state)?;
        }
        if !is_stopped {
            return Ok(Some(Event::Saved { step }));
        }
        self.phase = Phase::Ended;
        self.end_session()?;
        Ok(Some(Event::Stopped { step }))
    }

    fn products(&self) -> Products<'_> {
        Products { spec: &self.run.spec, folder: &self.run.folder }
    }

    /// Writes the folder of the model; each process writes its shards.
    fn finish(&mut self) -> Result<()> {
        let products = self.products();
        if let Some(lora) = self.model.model.lora().filter(|_| products.merges()) {
            self.replace_folder(&adapter_in(&self.path), |to| {
                products.save_adapters(&self.model, lora, to)
            })?;
        }
        let target = product_of(&self.path, &self.run.spec);
        let partial = self.folder.as_ref().map(|_| folder_beside(&target)).transpose();
        let partial = self.mesh.all_ok(partial)?;
        // Only the first process writes there.
        products.save(&self.model, partial.as_ref().map_or(&target, AtomicFolder::path))?;
        if let (Some(folder), Some(partial)) = (&mut self.folder, partial) {
            folder.save(partial)?;
        }
        self.end_session()
    }

    /// Writes a folder under a temporary name, and puts it in the place of `target`.
    fn replace_folder(&self, target: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let partial = self.folder.as_ref().map(|_| folder_beside(target)).transpose();
        let partial = self.mesh.all_ok(partial)?;
        // Only the first process writes there.
        write(partial.as_ref().map_or(target, AtomicFolder::path))?;
        let replaced = partial.map_or(Ok(()), AtomicFolder::replace);
        self.mesh.all_ok(replaced.map_err(|cause| Error::write(target, cause)))
    }

    fn end_session(&mut self) -> Result<()> {
        self.folder.as_mut().map_or(Ok(()), RunFolder::end_session)
    }

    /// Adds the step to an error about numbers that are not finite. An error of the run's folder is
    /// logged, since it must not hide the cause.
    fn located(&mut self, error: Error) -> Error {
        let Some(StepPosition { epoch, learning_rate, ref state }) = self.step else {
            return error;
        };
        let batch = state.step;
        let cause = match error {
            Error::Train(cause) if is_not_finite(&cause) => cause,
            error => return error,
        };
        if let Err(error) = self.end_session() {
            tracing::warn!("the end of the session is not recorded: {error}");
        }
        let checkpoints = self.checkpoints.steps().unwrap_or_else(|error| {
            tracing::warn!("the last checkpoint is unknown: {error}");
            Vec::new()
        });
        let is_counted = !matches!(self.phase, Phase::Validation);
        let diverged = RunError::Diverged {
            step: if is_counted { self.done } else { self.done + 1 },
            steps: self.run.spec.steps,
            batch,
            epoch,
            learning_rate,
            checkpoint: checkpoints.last().copied(),
            cause,
        };
        diverged.into()
    }
}

impl Iterator for Trainer {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.phase != Phase::Ended {
            match self.advance() {
                Ok(None) => {}
                Ok(Some(event)) => return Some(Ok(event)),
                Err(error) => {
                    let located = self.located(error);
                    self.phase = Phase::Ended;
                    return Some(Err(located));
                }
            }
        }
        None
    }
}

impl fmt::Debug for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, done, phase, .. } = self;
        let mut trainer = f.debug_struct("Trainer");
        trainer.field("path", path).field("done", done).field("phase", phase);
        trainer.finish_non_exhaustive()
    }
}

/// Returns true if a process is asked to stop. A signal may reach the processes in different steps,
/// and all must stop after the same step, so they ask each other.
fn is_stopped(mesh: &DeviceMesh, stop: &AtomicBool) -> Result<bool> {
    // Relaxed: nothing else is read on the strength of the flag.
    let is_stopped = stop.load(Ordering::Relaxed);
    Ok(shared::largest(mesh, is_stopped.into())? > 0)
}

/// Adds the numbers of a step's batches to its metrics.
fn with_tokens(metrics: StepMetrics, batches: &[Batch]) -> StepMetrics {
    let sum = |count: fn(&Batch) -> u64| batches.iter().map(count).sum();
    let sequences = sum(|batch| batch.len() as u64);
    metrics.batch(sequences, sum(|batch| batch.real_tokens), sum(Batch::padded_tokens))
}

/// Returns true if all processes end a step because numbers are not finite.
fn is_not_finite(error: &dist_train::Error) -> bool {
    matches!(
        error,
        dist_train::Error::Training(
            NonFiniteLoss { .. } | NonFiniteNorm { .. } | NonFiniteBuffer { .. }
        ) | dist_train::Error::Checkpoint(CheckpointError::NotFinite { .. })
    )
}

#[cfg(test)]
mod tests {
    use std::{fs, ops::Range};

    use candle_core::Tensor;
    use candle_nn::VarBuilder;
    use core_types::WorldSize;
    use dist_train::{AdamW, DataParallel, Declared, Group};
    use pmap_mesh::Uneven;

    use super::*;
    use crate::{
        error::folder::FolderError,
        run::folder::metrics,
        spec::{MixtureWeights, Spec},
        text::source::TextSource,
        train::{options::RunOptions, prepare::Start},
    };

    /// Returns a run of a small model in the folder `run` of `home`.
    fn options(home: &Path) -> RunOptions {
        let data = home.join("texts.jsonl");
        let lines: Vec<String> = (0..12).map(|n| format!("\"{n} and {}\"\n", n + 1)).collect();
        fs::write(&data, lines.concat()).unwrap();
        RunOptions {
            out: Some(home.join("run")),
            data: vec![TextSource::new(data)],
            n_layers: Some(1),
            hidden: Some(16),
            n_heads: Some(2),
            steps: Some(5),
            batch_size: Some(2),
            ..RunOptions::default()
        }
    }

    fn trainer(options: &RunOptions) -> Trainer {
        match options.prepare(WorldSize::new(2).unwrap()).unwrap() {
            Start::Train(run) => Trainer::new(&DeviceMesh::cpu(2).unwrap(), *run).unwrap(),
            Start::Complete(path) => panic!("{} is complete", path.display()),
        }
    }

    /// Trains to the end, and returns the names of the events.
    fn events(trainer: Trainer) -> Vec<&'static str> {
        let mut names = Vec::new();
        for event in trainer {
            names.push(match event.unwrap() {
                Event::Step { .. } => "step",
                Event::Validated { .. } => "validated",
                Event::Saved { .. } => "saved",
                Event::Stopped { .. } => "stopped",
                Event::Finished => "finished",
            });
        }
        names
    }

    #[test]
    fn events_come_in_order() {
        let home = tempfile::tempdir().unwrap();
        let options = RunOptions {
            validation: Some(0.5),
            validate_every: Some(2),
            checkpoint_every: Some(4),
            ..options(home.path())
        };
        let expected = [
            "step",
            "step",
            "validated",
            "step",
            "step",
            "validated",
            "saved",
            "step",
            "validated",
            "finished",
        ];
        assert_eq!(events(trainer(&options)), expected);
        assert!(home.path().join("run/best/model.safetensors").exists());
        let again = RunOptions { resume: true, ..options };
        let partial = home.path().join("run/.000000000000cafe.partial");
        fs::write(&partial, "left by a kill").unwrap();
        let start = again.prepare(WorldSize::new(3).unwrap()).unwrap();
        assert!(!partial.exists());
        assert!(matches!(start, Start::Complete(path) if path == home.path().join("run")));
    }

    #[test]
    fn damage_to_the_best_model_of_a_complete_run_is_found() {
        let home = tempfile::tempdir().unwrap();
        let options = RunOptions { steps: Some(2), validation: Some(0.5), ..options(home.path()) };
        events(trainer(&RunOptions { validate_every: Some(1), ..options.clone() }));
        let best = home.path().join("run/best/model.safetensors");
        let mut bytes = fs::read(&best).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&best, bytes).unwrap();
        let again = RunOptions { resume: true, ..options };
        let error = again.prepare(WorldSize::new(2).unwrap()).unwrap_err();
        assert!(matches!(error, Error::Folder(FolderError::Weights(_))), "{error}");
    }

    #[test]
    fn a_stopped_run_resumes_to_the_bit() {
        let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [whole, stopped] = homes.each_ref().map(|home| options(home.path()));
        events(trainer(&whole));
        let stop = Arc::new(AtomicBool::new(false));
        let mut trained = trainer(&stopped).stop_on(Arc::clone(&stop));
        assert!(matches!(trained.next(), Some(Ok(Event::Step { .. }))));
        stop.store(true, Ordering::Relaxed);
        assert!(matches!(trained.next(), Some(Ok(Event::Stopped { step: 1 }))));
        assert!(trained.next().is_none());
        drop(trained);
        let resumed = trainer(&RunOptions { resume: true, ..stopped });
        assert_eq!(resumed.run().first_step(), 1);
        assert_eq!(events(resumed), ["step", "step", "step", "step", "finished"]);
        let [expected, found] = homes
            .each_ref()
            .map(|home| fs::read(home.path().join("run/model/model.safetensors")).unwrap());
        assert!(found == expected);
    }

    /// Returns a run on two texts of 8 and 12 lines, 10 steps an epoch.
    fn mixed(home: &Path, weights: [Option<u64>; 2]) -> RunOptions {
        let options = options(home);
        let mut texts = options.data.clone();
        let path = home.join("more.jsonl");
        let lines: Vec<String> = (0..8).map(|n| format!("\"{n} or {n}\"\n")).collect();
        fs::write(&path, lines.concat()).unwrap();
        texts.insert(0, TextSource::new(path));
        for (text, weight) in texts.iter_mut().zip(weights) {
            text.weight = weight;
        }
        RunOptions { data: texts, steps: Some(24), ..options }
    }

    /// Trains until `done` steps are done, and stops there.
    fn stop_after(done: u64, options: &RunOptions) {
        let stop = Arc::new(AtomicBool::new(false));
        let mut trained = trainer(options).stop_on(Arc::clone(&stop));
        events_before(&mut trained, done);
        stop.store(true, Ordering::Relaxed);
        assert!(matches!(trained.last(), Some(Ok(Event::Stopped { .. }))));
    }

    #[test]
    fn mixed_runs_resume_to_the_bit() {
        let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let changed = [Some(1), Some(4)];
        // Both runs change their weights in epoch 0, and one stops in epoch 1 as well.
        for home in &homes {
            stop_after(3, &mixed(home.path(), [Some(7), Some(3)]));
        }
        let reweighted = |home: &Path| RunOptions { resume: true, ..mixed(home, changed) };
        events(trainer(&reweighted(homes[0].path())));
        stop_after(13, &reweighted(homes[1].path()));
        // Without weights, or with the same, nothing changes.
        stop_after(17, &reweighted(homes[1].path()));
        let unweighted = mixed(homes[1].path(), [None, None]);
        events(trainer(&RunOptions { resume: true, ..unweighted }));
        let [expected, found] = homes.each_ref().map(|home| {
            let run = home.path().join("run");
            let mixture = Spec::read(&run).unwrap().unwrap().finetune.mixture;
            let phase = |from_step, weights: [u64; 2]| MixtureWeights {
                from_epoch: 0,
                from_step,
                weights: weights.into(),
            };
            assert_eq!(mixture, [phase(0, [7, 3]), phase(3, [1, 4])]);
            fs::read(run.join("model/model.safetensors")).unwrap()
        });
        assert!(found == expected);
    }

    #[test]
    fn validation_gets_a_share_of_each_text() {
        let home = tempfile::tempdir().unwrap();
        let options = mixed(home.path(), [None, None]);
        let options = RunOptions { validation: Some(0.25), ..options };
        let Start::Train(run) = options.prepare(WorldSize::ONE).unwrap() else {
            panic!("complete")
        };
        assert_eq!(run.examples().len(), 6 + 9);
        let micro_batches = run.micro_batches().unwrap();
        let indices = micro_batches.iter().flatten().map(Batch::len).sum::<usize>();
        assert_eq!(indices, 15 + 5);
        assert_eq!(run.spec.finetune.mixture[0].weights, [1, 1]);
    }

    #[test]
    fn other_number_of_texts_is_rejected() {
        let home = tempfile::tempdir().unwrap();
        stop_after(1, &mixed(home.path(), [Some(7), Some(3)]));
        let resumed = RunOptions { resume: true, ..mixed(home.path(), [None, None]) };
        let fewer = RunOptions { data: resumed.data[..1].to_vec(), ..resumed };
        let error = fewer.prepare(WorldSize::ONE).unwrap_err().to_string();
        assert!(error.starts_with("data is another than the run started with: "), "{error}");
        assert!(error.contains("more.jsonl:7, ") && error.ends_with("texts.jsonl:3"), "{error}");
    }

    #[test]
    fn a_stop_interrupts_a_validation() {
        for (steps, after) in [
            (2, &["validated", "step", "step", "validated", "step", "validated", "finished"][..]),
            (5, &["validated", "finished"]),
        ] {
            let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
            let [whole, stopped] = homes.each_ref().map(|home| RunOptions {
                validation: Some(0.5),
                validate_every: Some(2),
                ..options(home.path())
            });
            events(trainer(&whole));
            let stop = Arc::new(AtomicBool::new(false));
            let mut trained = trainer(&stopped).stop_on(Arc::clone(&stop));
            let n_before = events_before(&mut trained, steps);
            assert_eq!(trained.done, steps, "{n_before} events");
            stop.store(true, Ordering::Relaxed);
            assert!(matches!(trained.next(), Some(Ok(Event::Stopped { step })) if step == steps));
            drop(trained);
            assert_eq!(events(trainer(&RunOptions { resume: true, ..stopped })), after);
            for file in ["model/model.safetensors", "best/model.safetensors", "validation.jsonl"] {
                let [expected, found] = homes
                    .each_ref()
                    .map(|home| fs::read(home.path().join("run").join(file)).unwrap());
                assert!(found == expected, "{file}, stopped after step {steps}");
            }
        }
    }

    /// Trains up to step `steps`, and returns the number of events.
    fn events_before(trainer: &mut Trainer, steps: u64) -> usize {
        let mut n_events = 0;
        while trainer.done < steps {
            trainer.next().unwrap().unwrap();
            n_events += 1;
        }
        n_events
    }

    #[test]
    fn other_options_are_rejected_on_resume() {
        let home = tempfile::tempdir().unwrap();
        let first = options(home.path());
        assert!(matches!(trainer(&first).next(), Some(Ok(Event::Step { .. }))));
        let resumed = RunOptions { resume: true, ..first };
        let other = RunOptions { steps: Some(6), ..resumed.clone() };
        let error = other.prepare(WorldSize::ONE).unwrap_err();
        assert_eq!(error.to_string(), "steps is another than the run started with: 5");
        fs::write(home.path().join("texts.jsonl"), "\"another text\"\n").unwrap();
        let error = resumed.prepare(WorldSize::ONE).unwrap_err();
        assert!(matches!(error, Error::Run(RunError::TextMismatch)), "{error}");
    }

    #[test]
    fn a_run_that_went_on_is_rejected() {
        let home = tempfile::tempdir().unwrap();
        let resume = RunOptions { resume: true, checkpoint_every: Some(1), ..options(home.path()) };
        events(trainer(&resume));
        let run = home.path().join("run");
        let [model, run_json] = ["model", "run.json"].map(|name| run.join(name));
        let latest = run.join("checkpoints/step-0000000004");
        let aside = home.path().join("aside");
        let description = fs::read(&run_json).unwrap();
        let metrics = || fs::read(run.join("metrics.jsonl")).unwrap();
        let before = metrics();
        let mesh = DeviceMesh::cpu(2).unwrap();
        let prepare = || match resume.prepare(WorldSize::new(2).unwrap()).unwrap() {
            Start::Train(run) => *run,
            Start::Complete(path) => panic!("{} is complete", path.display()),
        };
        let is_rejected = |run: PreparedRun, what| {
            let error = Trainer::new(&mesh, run).unwrap_err();
            assert!(
                matches!(error, Error::Run(RunError::ChangedWhileRead { .. })),
                "{what}: {error}"
            );
            assert_eq!(metrics(), before, "{what}");
        };
        // Another process saves a checkpoint, ends its session, and completes the run.
        fs::remove_dir_all(&model).unwrap();
        fs::rename(&latest, &aside).unwrap();
        let prepared = prepare();
        fs::rename(&aside, &latest).unwrap();
        is_rejected(prepared, "a checkpoint");
        let prepared = prepare();
        fs::write(&run_json, [&description[..], b"\n"].concat()).unwrap();
        is_rejected(prepared, "the description");
        fs::write(&run_json, &description).unwrap();
        let prepared = prepare();
        fs::create_dir(&model).unwrap();
        is_rejected(prepared, "a model");

        fs::remove_dir_all(&model).unwrap();
        assert_eq!(events(trainer(&resume)), ["step", "finished"]);
    }

    /// Returns a trainer of a model with a NaN parameter.
    fn trainer_of_nan(options: &RunOptions) -> Trainer {
        let mut trainer = trainer(options);
        let model = trainer.run.spec.trained_model().unwrap();
        let declared = model.clone();
        let build = move |vb: VarBuilder<'_>| declared.declare(&vb);
        let values = |declared: &Declared, items: Range<usize>| {
            let value = if declared.name == "model.norm.weight" { f32::NAN } else { 1.0 };
            Tensor::full(value, items.len(), &Device::Cpu)
        };
        let builder = DataParallel::builder(&trainer.mesh, build).by_units(model.units());
        let builder = builder.init_with(values).uneven(Uneven::Pad);
        let is_allowed = options.allow_non_finite;
        let builder = if is_allowed { builder.allow_non_finite() } else { builder };
        trainer.model.trained =
            builder.build(|group: Group| AdamW::new_lr(group.vars, 0.1)).unwrap();
        trainer
    }

    #[test]
    fn a_loss_of_nan_ends_the_run() {
        let home = tempfile::tempdir().unwrap();
        let mut trainer = trainer_of_nan(&options(home.path()));
        let error = trainer.next().unwrap().unwrap_err();
        let Error::Run(RunError::Diverged {
            step: 1,
            steps: 5,
            batch: 1,
            epoch: 0,
            checkpoint,
            ..
        }) = &error
        else {
            panic!("{error}")
        };
        assert_eq!(*checkpoint, None);
        assert!(error.to_string().ends_with("0.003: the loss of slot 0 is NaN"), "{error}");
        assert!(trainer.next().is_none());
        assert_eq!(metrics(&home.path().join("run")).unwrap().done(), 0);
    }

    #[test]
    fn a_run_may_go_on_after_nan() {
        let home = tempfile::tempdir().unwrap();
        let options = RunOptions { allow_non_finite: true, steps: Some(2), ..options(home.path()) };
        assert_eq!(events(trainer_of_nan(&options)), ["step", "step", "finished"]);
        let metrics = metrics(&home.path().join("run")).unwrap();
        assert!(metrics.steps()[1].loss.is_nan());
    }
}
