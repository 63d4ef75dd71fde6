//! What a run starts with: found out from its folder, its text and the arguments before anything is
//! changed.

use std::{
    iter,
    path::{Path, PathBuf},
    sync::Arc,
};

use candle_distributed::{
    batch::Batch,
    finetune::{
        self, Examples, Folder, Overlong,
        cost::{MemoryLimit, Sharding, machine_bytes, system_limits},
        data::{BatchSchedule, DataSet, default_max_tokens},
        run::{self, ResumePoint, RunSnapshot, ValidationSet},
        spec::{self, FORMAT_VERSION, RunInputs, Spec},
    },
    mesh::DeviceMesh,
    train::{self, CheckpointError, peak_bytes},
    types::{
        Seed, WorldSize,
        human::{HumanBytes, HumanCount},
    },
};

use crate::{
    commands::train::{
        Args,
        finetune::{Inputs, agrees},
        work_of,
    },
    devices::Place,
    error::{Error, ErrorKind, Result},
    help::typed,
    hint, output,
    train::agreement,
};

const DEFAULT_STEPS: u64 = 300;
const DEFAULT_SEED: u64 = 0;

/// How a run starts.
#[derive(Debug)]
pub(super) enum Start {
    /// The run in this folder has ended before.
    Complete(PathBuf),
    Train(Box<Beginning>),
}

/// What a run that trains starts with.
#[derive(Debug)]
pub(super) struct Beginning {
    pub(super) settings: Spec,
    /// How the model is sharded; every device has all of it if there is nothing here.
    pub(super) sharding: Option<Sharding>,
    pub(super) data: Arc<DataSet>,
    pub(super) schedule: BatchSchedule,
    /// Examples by which it is seen how much was learnt.
    pub(super) held_out: Option<ValidationSet>,
    /// The folder of the model.
    pub(super) folder: Folder,
    pub(super) from: Option<ResumePoint>,
    /// The run to resume, as it was before any of it was read.
    pub(super) seen: Option<RunSnapshot>,
    /// What the process takes now, if the system says so.
    pub(super) base_bytes: Option<u64>,
}

impl Beginning {
    /// The batches of the steps of an epoch, and of a validation if there are some.
    pub(super) fn steps(&self) -> Result<Vec<Vec<Batch>>> {
        let (_, mut steps) = self.schedule.first_epoch()?;
        steps.extend(self.held_out.iter().flat_map(ValidationSet::steps).cloned());
        Ok(steps)
    }

    /// Refuses an optimizer inside the backward pass that would have to wait for its end.
    fn check_optimizer(&self) -> Result<()> {
        let is_in_bwd =
            self.sharding.as_ref().is_some_and(|sharding| sharding.optimizer_in_backward);
        match self.settings.recipe.max_grad_norm {
            Some(norm) if is_in_bwd => Err(Error::usage(format!(
                "--optimizer-in-backward cannot be used with --max-grad-norm {norm}: the norm of all \
                 gradients is known after the backward pass"
            ))),
            Some(_) | None => Ok(()),
        }
    }
}

impl Args {
    /// What the run starts with, or why it cannot.
    pub(super) fn start(&self, place: Place) -> Result<Start> {
        if self.checkpoint_every == 0 {
            return Err(Error::usage(
                "--checkpoint-every 0 would write no checkpoint, it must be at least 1",
            ));
        }
        if self.memory_limit.is_some() && !self.devices.is_cpu() {
            let other = "--memory-limit is for --device cpu, whose memory is that of the process: \
                         what a run takes of another device's is not known beforehand";
            return Err(Error::usage(other));
        }
        let sharding = self.sharding.asked(place.placement.world_size())?;
        let mut known = None;
        let mut seen = None;
        if let Some(path) = self.resumed() {
            seen = Some(RunSnapshot::take(path)?);
            known = Spec::read(path)?;
        } else if let Some(out) = &self.out {
            run::check_empty(out)?;
        }
        if let Some(known) = &known {
            self.agrees_with(known)?;
        }
        // Before the text is read: a complete run needs none.
        if let (Some(path), Some(known)) = (self.resumed(), &known)
            && run::is_complete(path, known)?
        {
            return Ok(Start::Complete(path.into()));
        }
        let mut beginning = self.beginning(known, place.placement.world_size())?;
        beginning.seen = seen;
        beginning.sharding = sharding;
        beginning.check_optimizer()?;
        self.writing.check(&beginning)?;
        // A mesh that is too large for any machine is refused when it is made.
        let n_devices = place.placement.world_size().as_usize();
        if self.devices.is_cpu() && n_devices <= DeviceMesh::MAX_DEVICES {
            self.check_memory(place, &beginning)?;
        }
        Ok(Start::Train(Box::new(beginning)))
    }

    fn beginning(&self, known: Option<Spec>, world_size: WorldSize) -> Result<Beginning> {
        let is_known = known.is_some();
        let text = self.text(known.as_ref(), world_size)?;
        let settings = self.settings(known, &text, world_size)?;
        let Text { read, held_out, folder, .. } = text;
        let validation = settings.finetune.validation;
        let held_out = match (held_out, validation) {
            (Some(read), Some(validation)) => {
                Some(ValidationSet::new(read, &settings, validation.every)?)
            }
            (None | Some(_), None | Some(_)) => None,
        };
        let mut from = None;
        if let Some(path) = self.resumed() {
            let checkpoints = run::checkpoints(path, &settings);
            from = ResumePoint::latest(&checkpoints, settings.steps).map_err(unreadable)?;
            if !is_known {
                refuse_unknown(path)?;
            }
        }
        let schedule = settings.schedule(read.lengths())?;
        // A position that is not one in these batches is refused here; the batches come later.
        drop(schedule.batches(from.as_ref().map(|from| &from.batches))?);
        Ok(Beginning {
            settings,
            sharding: None,
            data: Arc::new(read),
            schedule,
            held_out,
            folder,
            from,
            seen: None,
            base_bytes: peak_bytes(),
        })
    }

    fn inputs(&self, seed: u64) -> Inputs<'_> {
        Inputs { sizes: &self.sizes, context: self.context, seed }
    }

    /// What the run learns from.
    fn text(&self, known: Option<&Spec>, world_size: WorldSize) -> Result<Text> {
        let data = self.data.clone().or_else(|| known?.data.clone());
        let seed = known.map_or(self.seed.unwrap_or(DEFAULT_SEED), |known| known.seed);
        let inputs = self.inputs(seed);
        let (folder, finetune) = self.finetune.asked(known, &inputs)?;
        if data.is_none() && finetune.folder.is_some() {
            return Err(Error::usage("--model needs --data, the texts to learn from")
                .hinted(hint::EXAMPLE_LINES));
        }
        let (fingerprint, train, held_out) =
            finetune.examples(&folder, data.as_deref(), Seed::new(seed))?;
        say_overlong(&train, &finetune);
        say_files(&train);
        let finetune = match (known, self.context) {
            (None, None) => {
                let held_out = held_out.iter().flat_map(Examples::lengths);
                finetune.for_longest(train.lengths().into_iter().chain(held_out).fold(0, u64::max))
            }
            (Some(_), _) | (_, Some(_)) => finetune,
        };
        let data_set = |examples| {
            let devices = world_size.as_usize();
            DataSet::new(examples, finetune.rows, devices)
        };
        let (read, held_out) = (data_set(train), held_out.map(data_set));
        Ok(Text { data, read, held_out, fingerprint, finetune, folder })
    }

    /// Checks that the arguments do not contradict those that the run started with.
    fn agrees_with(&self, known: &Spec) -> Result<()> {
        self.inputs(known.seed).agree_with(&known.finetune)?;
        let options = [
            ("steps", self.steps, known.steps),
            ("seed", self.seed, known.seed),
            ("max-tokens", self.max_tokens, known.max_tokens),
        ];
        for (name, asked, known) in options {
            let asked = asked.map(|asked| asked.to_string());
            agrees(name, asked.as_deref(), Some(&known.to_string()))?;
        }
        for ((name, asked), (_, known)) in iter::zip(self.recipe.options(), known.recipe.options())
        {
            agrees(name, asked.as_deref(), known.as_deref())?;
        }
        Ok(())
    }

    /// The settings of the run: those that it started with, if it is resumed.
    fn settings(&self, known: Option<Spec>, read: &Text, world_size: WorldSize) -> Result<Spec> {
        let Text { data, fingerprint: text, finetune, .. } = read;
        if let Some(path) = data.as_ref().filter(|path| path.to_str().is_none()) {
            return Err(Error::usage(format!(
                "--data {} is not UTF-8, and run.json cannot name it",
                path.display()
            )));
        }
        let settings = match known {
            Some(known) if *text != known.text => {
                let changed = Error::usage("the text is not the one that the run started with");
                return Err(changed.hinted(hint::TEXT));
            }
            Some(known) => known,
            None => self.new_settings(read, world_size)?,
        };
        let settings = Spec {
            data: data.clone(),
            // Its folder may have moved.
            finetune: finetune.clone(),
            allow_non_finite: settings.allow_non_finite || self.allow_non_finite,
            // The model that is there, if any, is not that of a run with steps left.
            model_files: vec![],
            model_fingerprint: None,
            ..settings
        };
        Ok(settings.sealed())
    }

    /// The settings of a new run.
    fn new_settings(&self, read: &Text, world_size: WorldSize) -> Result<Spec> {
        let steps = self.steps.unwrap_or(DEFAULT_STEPS);
        if steps == 0 {
            return Err(Error::usage("--steps 0 trains nothing, it must be at least 1"));
        }
        self.recipe.check(steps)?;
        let finetune = &read.finetune;
        let recipe = self.recipe.clone().with_defaults(steps, finetune.folder.is_none());
        let settings = Spec {
            format_version: FORMAT_VERSION,
            seed: self.seed.unwrap_or(DEFAULT_SEED),
            steps,
            data: None,
            text: read.fingerprint.clone(),
            max_tokens: self.checked_max_tokens(finetune, world_size)?,
            allow_non_finite: false,
            finetune: finetune.clone(),
            recipe,
            sessions: vec![],
            identity: String::new(),
            model_files: vec![],
            model_fingerprint: None,
        };
        settings.check_adapters()?;
        Ok(settings)
    }

    /// The most tokens of a step: those that are asked for, if the longest sequence fits.
    fn checked_max_tokens(&self, finetune: &RunInputs, world_size: WorldSize) -> Result<u64> {
        let longest = finetune.context;
        let of_sequences = finetune.batch_size.map(|n| n.saturating_mul(longest as u64));
        match self.max_tokens.or(of_sequences) {
            None => Ok(default_max_tokens(world_size, longest)),
            Some(asked) if asked >= longest as u64 => Ok(asked),
            Some(asked) => {
                let small = format!("--max-tokens is {asked}, must be at least {longest}");
                Err(Error::usage(small).hinted(hint::MAX_TOKENS))
            }
        }
    }

    /// The least of the limits of this process's memory, if there is one.
    pub(super) fn limit(&self, place: Place) -> Option<MemoryLimit> {
        let limits = match self.memory_limit {
            Some(bytes) => vec![MemoryLimit::for_process(bytes, "--memory-limit")],
            None => system_limits(place.processes_here()),
        };
        limits.into_iter().min_by_key(MemoryLimit::share)
    }

    /// Checks that the memory that this process will probably take is there.
    fn check_memory(&self, place: Place, beginning: &Beginning) -> Result<()> {
        let steps = beginning.steps()?;
        let model = beginning.settings.trained_model()?;
        let parameters = model.parameters()?;
        let work = work_of(beginning, &model, &parameters, &steps, place, self.check);
        let needed = work.predict()?.total();
        tracing::info!("this process will take about {}", HumanBytes(needed.into()));
        if let Some(limit) = self.limit(place)
            && limit.share() < needed
        {
            let error = Error::from(ErrorKind::Memory { needed, limit });
            let is_sharded = beginning.sharding.is_some();
            return Err(if is_sharded { error.hinted(hint::MEMORY_OF_PARTS) } else { error });
        }
        // What the system does then, it does not say: it may have room elsewhere.
        let together = needed.saturating_mul(place.processes_here());
        if let Some(bytes) = machine_bytes().filter(|&bytes| bytes < together) {
            output::warning(format_args!(
                "the run will take about {} on this machine, which has {}",
                HumanBytes(together.into()),
                HumanBytes(bytes.into())
            ));
        }
        Ok(())
    }

    /// What all processes must say alike, of what they start with and of their arguments.
    pub(super) fn words(&self, start: &Result<Start>) -> Vec<String> {
        let beginning = match start {
            Err(_) => return vec!["cannot start".into()],
            Ok(Start::Complete(_)) => return vec!["finds the run complete".into()],
            Ok(Start::Train(beginning)) => beginning,
        };
        let Spec { seed, steps, text, max_tokens, allow_non_finite, finetune, recipe, .. } =
            &beginning.settings;
        let out = self.out.as_deref().map_or("a new folder".into(), Path::to_string_lossy);
        let first = beginning.from.as_ref().map_or(0, |from| from.checkpoint.step());
        vec![
            format!("starts after step {first}"),
            format!("has --steps {steps}"),
            format!("has --seed {seed}"),
            format!("has the text {text}"),
            format!("has batches of {max_tokens} tokens"),
            format!("has --out {out}"),
            format!("has --checkpoint-every {}", self.checkpoint_every),
            format!("has --check {}", self.check),
            format!("has --allow-non-finite {allow_non_finite}"),
            format!("trains {}", finetune.words()),
            format!("learns by {}", recipe.words()),
            match &beginning.sharding {
                Some(sharding) => format!("is sharded by {}", sharding.words()),
                None => "is not sharded".into(),
            },
            format!("has --dry-run {}", self.dry_run),
            format!("has version {}", env!("CARGO_PKG_VERSION")),
        ]
    }
}

/// What a run learns from, and what learns from it.
struct Text {
    /// Its path; `None` for short stories.
    data: Option<PathBuf>,
    read: DataSet,
    held_out: Option<DataSet>,
    /// That of all of it, in hexadecimal digits.
    fingerprint: String,
    finetune: RunInputs,
    folder: Folder,
}

/// Says how many texts are cut off or left out.
fn say_overlong(examples: &Examples, finetune: &RunInputs) {
    let n_overlong = examples.n_overlong();
    // Nothing is lost of those that are split.
    if n_overlong > 0 && finetune.overlong != Overlong::Split {
        output::warning(format_args!(
            "{} longer than the context of {} tokens: --overlong {}",
            HumanCount(n_overlong.into()).with_noun("text"),
            finetune.context,
            typed(finetune.overlong)
        ));
    }
}

/// Says which files of a folder may not be meant as examples, or cannot be.
fn say_files(examples: &Examples) {
    let files = examples.files();
    if files.skipped > 0 {
        let skipped = HumanCount(files.skipped.into()).with_noun("file");
        output::warning(format_args!("{skipped} of --data skipped, as not UTF-8"));
    }
    if files.of_lines > 0 && files.of_texts > 0 {
        let texts = HumanCount(files.of_texts.into()).with_noun("file");
        output::warning(format_args!(
            "{texts} of --data beside those of lines: every paragraph there is an example"
        ));
    }
}

/// Adds advice if the latest checkpoint cannot be read at all: one that is damaged is skipped.
fn unreadable(error: finetune::Error) -> Error {
    let error = Error::from(error);
    match &*error.kind {
        ErrorKind::Training(train::Error::Checkpoint(
            CheckpointError::Io { .. } | CheckpointError::Header { .. },
        )) => error.hinted(hint::UNREADABLE),
        _ => error,
    }
}

/// Refuses a folder that holds parts of a run without its settings.
fn refuse_unknown(path: &Path) -> Result<()> {
    let found = run::contents(path)?;
    if found.is_empty() {
        return Ok(());
    }
    // It was not there when it was read: another program has just started the run.
    if found.contains(&spec::FILE) {
        return Err(agreement::went_on(path));
    }
    let lacks = format!("{} holds {}, but no run.json", path.display(), found.join(" and "));
    Err(Error::usage(lacks).hinted(hint::NO_SETTINGS))
}
