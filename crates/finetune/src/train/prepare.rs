//! The start of a run, found out from its options, its folder and its texts before anything changes.

use std::{iter, path::PathBuf, sync::Arc};

use candle_core::Device;
use core_types::{Seed, WorldSize};
use data_loader::prefetch;
use dist_train::peak_bytes;
use dyn_batch::{Batch, BatchState, PaddingReport};
use fsdp_plan::ParameterInfo;
use pmap_mesh::DeviceMesh;

use crate::{
    cost::{
        memory::Workload,
        sharding::{RunPlan, Sharding},
        traffic::StepTraffic,
    },
    data::{
        dataset::{BatchTensors, DataSet},
        model::Model,
        schedule::{BatchSchedule, MixtureWeights, ScheduledStep, default_max_tokens},
    },
    error::{Result, run::RunError, spec::SpecError},
    folder::Folder,
    run::{
        folder::{
            RunSnapshot, check_empty, check_other_products, checkpoints, contents, is_complete,
            remove_leftovers,
        },
        resumed::ResumePoint,
        validation_set::ValidationSet,
    },
    spec::{self, FORMAT_VERSION, RunInputs, RunTexts, Spec, Validation},
    text::examples::Examples,
    train::{model::TrainedModel, options::RunOptions},
};

/// The start of a run.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "a run has ended, or it has not")]
pub enum Start {
    /// The run in this folder has ended before.
    Complete(PathBuf),
    /// The run has steps left.
    Train(Box<PreparedRun>),
}

/// A run with its texts in memory, before anything is written.
#[derive(Debug)]
#[non_exhaustive]
pub struct PreparedRun {
    /// Description of the run.
    pub spec: Spec,
    /// Sharding of the model, or `None` if every device has all of it.
    pub sharding: Option<Sharding>,
    /// Folder of the model.
    pub folder: Folder,
    /// Number of steps from one checkpoint to the next.
    pub checkpoint_every: u64,
    /// Memory of the process before training, if the system reports it.
    pub base_bytes: Option<u64>,
    pub(super) model: Model,
    parameters: Vec<ParameterInfo>,
    pub(super) out: Option<PathBuf>,
    pub(super) is_resumed: bool,
    pub(super) validation: Option<ValidationSet>,
    pub(super) resume_point: Option<ResumePoint>,
    /// State of the folder of a resumed run before any of it was read.
    pub(super) snapshot: Option<RunSnapshot>,
    /// Threads that make batches share it.
    data: Arc<DataSet>,
    schedule: Arc<BatchSchedule>,
    world_size: WorldSize,
}

impl RunOptions {
    /// Reads the model, the texts and the checkpoints, and checks the run for `world_size` devices.
    /// Nothing is written; partial files that a killed process left in a complete run are removed.
    ///
    /// # Errors
    ///
    /// [`Error::Spec`](crate::Error::Spec) if an option is invalid, or not the one that a resumed run
    /// started with; [`Error::Run`](crate::Error::Run) if the folder holds another run, its texts have
    /// changed, or its checkpoints are ahead of it; and the errors of reading the model, the texts and
    /// the checkpoints.
    pub fn prepare(&self, world_size: WorldSize) -> Result<Start> {
        const CHECKPOINT_EVERY: u64 = 50;
        const AFTER_FIRST_EPOCH: (u64, u64) = (1, 0);
        self.check()?;
        let mut saved_spec = None;
        let mut snapshot = None;
        if let Some(path) = self.resumed() {
            snapshot = Some(RunSnapshot::take(path)?);
            saved_spec = Spec::read(path)?;
            if let Some(saved_spec) = &saved_spec {
                self.check_resumed(saved_spec)?;
                // Before the texts are read: a complete run needs none.
                if is_complete(path, saved_spec)? {
                    check_other_products(path)?;
                    remove_leftovers(path, saved_spec);
                    return Ok(Start::Complete(path.into()));
                }
            }
        } else if let Some(out) = &self.out {
            check_empty(out)?;
        }
        let has_saved_spec = saved_spec.is_some();
        let Texts { data, part_lens, held_out, folder, mut spec } =
            self.read(saved_spec, world_size)?;
        let resume_point = self.resume_point(&spec, has_saved_spec)?;
        let mut schedule = spec.training_schedule(data.lengths(), &part_lens)?;
        // A position outside of these batches is rejected here; the batches are made later.
        let batch_state = resume_point.as_ref().map(|point| &point.batch_state);
        let n_done = schedule.steps_done(batch_state)?;
        // New weights hold from the position on. Without one they hold from epoch 1: the weights of
        // the first step are part of the run's identity.
        let weights_from =
            batch_state.map_or(AFTER_FIRST_EPOCH, |state| (state.epoch.as_u64(), n_done));
        if has_saved_spec && self.reweight(&mut spec, weights_from) {
            schedule = spec.training_schedule(data.lengths(), &part_lens)?;
            // Only a check: the epoch must have steps with the new weights, too.
            schedule.steps_done(batch_state)?;
        }
        let model = spec.trained_model()?;
        // Clipping needs the norm of all gradients, and accumulation their sums, which are known only
        // after the last backward pass.
        let optimizer_in_backward =
            spec.recipe.max_grad_norm.is_none() && !spec.finetune.accumulates();
        let sharding = self.sharding.clone();
        Ok(Start::Train(Box::new(PreparedRun {
            parameters: model.parameters()?,
            model,
            validation: validation_set(held_out, &spec)?,
            spec,
            sharding: sharding.map(|sharding| Sharding { optimizer_in_backward, ..sharding }),
            folder,
            base_bytes: peak_bytes(),
            out: self.out.clone(),
            is_resumed: self.resume,
            checkpoint_every: self.checkpoint_every.unwrap_or(CHECKPOINT_EVERY),
            resume_point,
            snapshot,
            data: Arc::new(data),
            schedule: Arc::new(schedule),
            world_size,
        })))
    }

    /// Reads the model and the texts; `saved_spec` is the description of a resumed run.
    fn read(&self, saved_spec: Option<Spec>, world_size: WorldSize) -> Result<Texts> {
        let mut paths: Vec<PathBuf> = self.data.iter().map(|text| text.path.clone()).collect();
        if paths.is_empty()
            && let Some(saved) = &saved_spec
        {
            paths.clone_from(&saved.data);
        }
        let seed = saved_spec.as_ref().map_or(self.seed.unwrap_or(0), |saved| saved.seed);
        let (folder, mut inputs) = self.inputs(saved_spec.as_ref(), seed)?;
        if paths.is_empty() && inputs.folder.is_some() {
            return Err(SpecError::NoData.into());
        }
        let RunTexts { fingerprint, train, part_lens, held_out } =
            inputs.read_texts(&folder, &paths, Seed::new(seed), self.max_text_bytes)?;
        if saved_spec.is_none() && self.context.is_none() {
            let held_out = held_out.iter().flat_map(Examples::lengths);
            let longest = train.lengths().into_iter().chain(held_out).fold(0, u64::max);
            inputs = inputs.for_longest(longest);
        }
        let devices = world_size.as_usize();
        let rows = inputs.rows;
        let data_set = |examples| DataSet::new(examples, rows, devices);
        let spec = match saved_spec {
            Some(saved) if fingerprint != saved.text => {
                return Err(RunError::TextMismatch.into());
            }
            Some(saved) => Spec { finetune: inputs, ..saved },
            None => self.new_spec(fingerprint, inputs, world_size)?,
        };
        let spec = Spec {
            data: paths,
            allow_non_finite: spec.allow_non_finite || self.allow_non_finite,
            // The run is not complete, so a model in its folder is not, or no longer, its own:
            // list no files of it.
            model_files: vec![],
            model_fingerprint: None,
            ..spec
        };
        let (data, held_out) = (data_set(train), held_out.map(data_set));
        Ok(Texts { data, part_lens, held_out, folder, spec: spec.sealed() })
    }

    /// Describes a new run.
    fn new_spec(&self, text: String, inputs: RunInputs, world_size: WorldSize) -> Result<Spec> {
        const STEPS: u64 = 300;
        let steps = self.steps.unwrap_or(STEPS);
        self.recipe.check(steps)?;
        let spec = Spec {
            format_version: FORMAT_VERSION,
            seed: self.seed.unwrap_or(0),
            steps,
            data: Vec::new(),
            text,
            max_tokens: self.checked_max_tokens(&inputs, world_size)?,
            allow_non_finite: false,
            recipe: self.recipe.clone().with_defaults(steps, inputs.folder.is_none()),
            finetune: inputs,
            sessions: vec![],
            identity: String::new(),
            model_files: vec![],
            model_fingerprint: None,
        };
        spec.check_adapters()?;
        spec.check_rows()?;
        Ok(spec)
    }

    /// Returns the limit on the tokens of a step, or an error if a sequence of `context` tokens
    /// does not fit into each micro-batch.
    fn checked_max_tokens(&self, inputs: &RunInputs, world_size: WorldSize) -> Result<u64> {
        // Each micro-batch must be able to hold the longest sequence.
        let context = inputs.context as u64;
        if let Some(limit) = inputs.max_tokens_per_batch.filter(|&limit| limit < context) {
            let expected = format!("at least {context}");
            return Err(SpecError::setting("max_tokens_per_batch", &limit, expected).into());
        }
        let min_tokens = inputs.context.saturating_mul(inputs.micro_batches());
        let of_sequences = inputs.batch_size.map(|n| n.saturating_mul(inputs.context as u64));
        match self.max_tokens.or(of_sequences) {
            None => Ok(default_max_tokens(world_size, min_tokens)),
            Some(asked) if asked >= min_tokens as u64 => Ok(asked),
            Some(asked) => {
                let expected = format!("at least {min_tokens}");
                Err(SpecError::setting("max_tokens", &asked, expected).into())
            }
        }
    }

    /// Applies the weights that were requested for a resumed run, from this epoch and step on.
    /// Returns false if none were requested, or if the run has a single text.
    fn reweight(&self, spec: &mut Spec, (from_epoch, from_step): (u64, u64)) -> bool {
        if self.data.iter().all(|text| text.weight.is_none()) || spec.finetune.mixture.is_empty() {
            return false;
        }
        let previous = spec.finetune.weights_at(from_epoch, from_step);
        let weights = iter::zip(&self.data, previous);
        let weights = weights.map(|(text, &previous)| text.weight.unwrap_or(previous)).collect();
        spec.finetune.set_weights_from(MixtureWeights { from_epoch, from_step, weights });
        true
    }

    /// Opens the checkpoint to resume from, if there is one.
    fn resume_point(&self, spec: &Spec, has_saved_spec: bool) -> Result<Option<ResumePoint>> {
        let Some(path) = self.resumed() else { return Ok(None) };
        let found = ResumePoint::latest(&checkpoints(path, spec), spec.steps)?;
        if has_saved_spec {
            return Ok(found);
        }
        let contents = contents(path)?;
        // This program found no description before: another program has started the run since.
        if contents.contains(&spec::FILE) {
            return Err(RunError::ChangedWhileRead { path: path.into() }.into());
        }
        if contents.is_empty() {
            return Ok(found);
        }
        Err(RunError::NoDescription { path: path.into(), contents }.into())
    }
}

/// The texts of a run, and the description that follows from them.
struct Texts {
    data: DataSet,
    part_lens: Vec<u64>,
    held_out: Option<DataSet>,
    folder: Folder,
    spec: Spec,
}

fn validation_set(held_out: Option<DataSet>, spec: &Spec) -> Result<Option<ValidationSet>> {
    match (held_out, spec.finetune.validation) {
        (Some(data), Some(Validation { every, .. })) => {
            ValidationSet::new(data, spec, every).map(Some)
        }
        _ => Ok(None),
    }
}

impl PreparedRun {
    /// Returns the number of steps that are done before the run starts.
    pub fn first_step(&self) -> u64 {
        self.resume_point.as_ref().map_or(0, |point| point.checkpoint.step())
    }

    /// Returns the examples for training.
    pub fn examples(&self) -> &Examples {
        self.data.examples()
    }

    /// Returns the padding of the first epoch.
    ///
    /// # Errors
    ///
    /// [`Error::Batch`](crate::Error::Batch) if there are 2^32 sequences or more.
    pub fn first_epoch_padding(&self) -> Result<PaddingReport> {
        Ok(self.schedule.first_epoch()?.0)
    }

    /// Returns the micro-batches of the first epoch, each with the batches of all ranks, and the
    /// micro-batches of a validation if there is one.
    ///
    /// # Errors
    ///
    /// The errors of [`first_epoch_padding`](Self::first_epoch_padding).
    pub fn micro_batches(&self) -> Result<Vec<Vec<Batch>>> {
        let (_, mut all) = self.schedule.first_epoch()?;
        all.extend(self.validation.iter().flat_map(ValidationSet::micro_batches).cloned());
        Ok(all)
    }

    /// Plans the model of the run.
    ///
    /// # Errors
    ///
    /// [`Error::Plan`](crate::Error::Plan) if the parameters cannot be sharded over the devices of the run.
    pub fn plan(&self) -> Result<RunPlan> {
        self.spec.plan(self.sharding.as_ref(), self.world_size)
    }

    /// Returns the work of the process with these ranks, from the first to the one after the last;
    /// `micro_batches` come from [`micro_batches`](Self::micro_batches).
    pub fn workload<'a>(
        &'a self,
        micro_batches: &'a [Vec<Batch>],
        ranks: (u64, u64),
    ) -> Workload<'a> {
        Workload {
            sizes: self.model.sizes(),
            precision: self.spec.recipe.precision(),
            parameters: &self.parameters,
            sharding: self.sharding.as_ref(),
            micro_batches,
            is_packed: self.spec.is_packed(),
            accumulates: self.spec.finetune.accumulates(),
            check: false,
            world_size: self.world_size.as_u64(),
            ranks,
            // Some systems do not report it.
            base_bytes: self.base_bytes.unwrap_or(0),
        }
    }

    /// Trains two steps without saving them, and returns the traffic of this process's first device in
    /// the second step.
    ///
    /// # Errors
    ///
    /// The errors of building the model, and of a step.
    pub fn rehearse(&self, mesh: &DeviceMesh) -> Result<StepTraffic> {
        let mut model = TrainedModel::new(mesh, &self.spec, self.sharding.as_ref())?;
        let mut sent = StepTraffic::default();
        for (step, batch) in (0..2).zip(self.batches(&mesh.devices()[0], None)?) {
            let before = StepTraffic::so_far(mesh);
            let learning_rate = self.spec.recipe.learning_rate(step, self.spec.steps);
            model.step(batch?.tensors, learning_rate)?;
            sent = StepTraffic::since(mesh, before);
        }
        Ok(sent)
    }

    /// Returns the batches after `state`, which a thread makes while steps run.
    pub(super) fn batches(
        &self,
        device: &Device,
        state: Option<&BatchState>,
    ) -> Result<impl Iterator<Item = Result<StepBatch>> + use<>> {
        let (data, device) = (Arc::clone(&self.data), device.clone());
        let collate = move |scheduled: Result<ScheduledStep>| {
            let scheduled = scheduled?;
            let micro_batches = scheduled.micro_batches.iter();
            let tensors = micro_batches.map(|batches| data.collate(batches, &device));
            let tensors = tensors.collect::<candle_core::Result<_>>()?;
            Ok(StepBatch { scheduled, tensors })
        };
        Ok(prefetch(self.schedule.steps(state)?).map(collate)?)
    }

    /// Returns the validation if it is due after `done` steps.
    pub(super) fn due_validation(&self, done: u64) -> Option<&ValidationSet> {
        self.validation.as_ref().filter(|validation| validation.is_due(done, self.spec.steps))
    }

    /// Returns the position after the checkpoint that the run resumes from.
    pub(super) fn position(&self) -> Option<&BatchState> {
        self.resume_point.as_ref().map(|point| &point.batch_state)
    }
}

/// The batches of a step, with the tensors of each micro-batch.
pub(super) struct StepBatch {
    pub(super) scheduled: ScheduledStep,
    pub(super) tensors: Vec<BatchTensors>,
}
