//! The description of a run: `run.json`.

pub(crate) mod inputs;
pub(crate) mod recipe;
pub(crate) mod session;

use std::{
    io::Write,
    iter,
    path::{Path, PathBuf},
};

use candle_core::DType;
use core_types::{
    Fingerprint, Seed, WorldSize,
    files::{self as atomic, AtomicFile},
};
use dist_checkpoint::{
    StoredWeights,
    support::{add_footer, check_footer},
};
use dyn_batch::{Batch, DynamicBatchStrategy, Packing, PaddingReport};
use fsdp_plan::ParameterInfo;
use serde::{Deserialize, Serialize};

pub(crate) use self::inputs::RunTexts;
pub use self::{
    inputs::{RunInputs, Validation},
    recipe::{LrCurve, Recipe},
    session::Session,
};
pub use crate::data::schedule::MixtureWeights;
use crate::{
    cost::{
        memory::Workload,
        sharding::{RunPlan, Sharding},
    },
    data::{
        dataset::Rows,
        model::Model,
        schedule::{BatchSchedule, Batching, INIT_STREAM, ORDER_STREAM},
    },
    error::{Error, Result, run::RunError, spec::SpecError},
    files,
    text::source::TextSource,
};

/// The file of the description.
pub(crate) const FILE: &str = files::RUN_JSON;

/// The format version of the file.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// The description of a run: its model, texts, training options and sessions.
///
/// Two runs are the same if their [`identity`](Self::identity) is equal. A run can only be resumed
/// with its original description.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Format version of the file.
    pub format_version: u32,
    /// Seed of random weights and of the order of the examples.
    pub seed: u64,
    /// Number of steps.
    pub steps: u64,
    /// Files and folders of the texts; empty for short stories.
    #[serde(default, with = "paths")]
    pub data: Vec<PathBuf>,
    /// Fingerprint of the texts in hexadecimal digits.
    pub text: String,
    /// Maximum padded tokens of a step.
    pub max_tokens: u64,
    /// Whether the run continues after an infinite or NaN loss.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_non_finite: bool,
    /// Model and layout of the texts.
    pub finetune: RunInputs,
    /// Training options.
    #[serde(default, skip_serializing_if = "Recipe::is_default")]
    pub recipe: Recipe,
    /// Sessions in order. A started run has at least one.
    pub sessions: Vec<Session>,
    /// Fingerprint of the description. Checkpoints contain it too.
    pub identity: String,
    /// Files that the run wrote into the folder of its model. Users may add others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub model_files: Vec<String>,
    /// Fingerprint of these files, after the run has written them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_fingerprint: Option<String>,
}

/// The first epoch of a run.
#[derive(Debug)]
pub struct FirstEpoch {
    /// Lengths of the sequences.
    pub lengths: Vec<u64>,
    /// Micro-batches, each with the batches of all ranks.
    pub micro_batches: Vec<Vec<Batch>>,
    /// Padding of the batches.
    pub report: PaddingReport,
}

impl Spec {
    /// Reads the description of the run in `path`, or returns `None` if there is no run.
    ///
    /// # Errors
    ///
    /// [`RunError::Description`] if the file has another format version, or has changed.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let path = path.join(FILE);
        let Some(text) = files::read_if_there(&path)? else { return Ok(None) };
        let spec: Self = serde_json::from_slice(&text).map_err(|cause| Error::Json {
            path: path.clone(),
            expected: "the settings of a run",
            cause,
        })?;
        spec.check(path, &text)?;
        Ok(Some(spec))
    }

    /// Checks the format version, and that the text of the file is unchanged.
    fn check(&self, path: PathBuf, text: &[u8]) -> Result<()> {
        if self.format_version != FORMAT_VERSION {
            let found = self.format_version;
            let reason =
                format!("has format_version {found}, and this program reads {FORMAT_VERSION}");
            return Err(RunError::Description { path, reason }.into());
        }
        let is_changed = check_footer(&path, text).is_err() || self.identity != self.identity();
        let has_weights = self.finetune.has_valid_mixture(self.data.len());
        if is_changed || self.sessions.is_empty() || !has_weights {
            let reason = "is damaged: it has changed since the run wrote it".into();
            return Err(RunError::Description { path, reason }.into());
        }
        self.recipe.check(self.steps)?;
        self.check_adapters()
    }

    /// Checks that adapters have a pretrained base model.
    ///
    /// # Errors
    ///
    /// [`SpecError::AdaptersAlone`] without the folder of a model.
    pub(crate) fn check_adapters(&self) -> Result<()> {
        match (self.recipe.lora, &self.finetune.folder) {
            (Some(rank), None) => Err(SpecError::AdaptersAlone { rank }.into()),
            _ => Ok(()),
        }
    }

    /// Rejects a number of packed rows that the micro-batches do not divide, or that the tokens of a
    /// step do not allow: rows would be left out.
    ///
    /// # Errors
    ///
    /// [`SpecError::Setting`].
    pub(crate) fn check_rows(&self) -> Result<()> {
        let Some(asked) = self.finetune.batch_size.filter(|_| self.is_packed()) else {
            return Ok(());
        };
        let batching = self.batching();
        let rows = batching.n_batches * batching.accumulate.unwrap_or(1);
        if rows == asked {
            return Ok(());
        }
        let expected = format!("{rows}, the packed rows of the micro-batches of a step");
        Err(SpecError::setting("batch_size", &asked, expected).into())
    }

    /// Writes the file into the folder of the run.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let path = path.join(FILE);
        atomic::write(&path, &self.encoded(&path)?).map_err(|cause| Error::write(&path, cause))
    }

    /// Writes the file, which must not exist. If several programs do so at once, one succeeds.
    pub(crate) fn write_new(&self, path: &Path) -> Result<()> {
        let path = path.join(FILE);
        let content = self.encoded(&path)?;
        let written = AtomicFile::replacing(&path).and_then(|mut file| {
            file.write_all(&content)?;
            file.persist_new()
        });
        written.map_err(|cause| Error::write(path, cause))
    }

    fn encoded(&self, path: &Path) -> Result<Vec<u8>> {
        let text = serde_json::to_vec_pretty(self);
        Ok(add_footer(text.map_err(|cause| Error::write(path, cause.into()))?))
    }

    /// Returns the model with its adapters.
    ///
    /// # Errors
    ///
    /// [`SpecError::Model`] if the model is not supported, or an error of [`Recipe::adapters`].
    pub(crate) fn trained_model(&self) -> Result<Model> {
        let decoder = self.finetune.decoder()?;
        let layers = decoder.config().adapted();
        let Some(lora) = self.recipe.adapters(layers)? else { return Ok(Model(decoder)) };
        let adapted = |lora| decoder.clone().with_lora(lora).map(Model).map_err(SpecError::Model);
        let model = adapted(lora.clone())?;
        Ok(match self.base_dtype(&model)? {
            Some(dtype) => adapted(lora.with_base_dtype(dtype))?,
            None => model,
        })
    }

    /// Returns the half precision in which the pretrained weights contain all adapted layers, or
    /// `None` if they do not.
    fn base_dtype(&self, model: &Model) -> Result<Option<DType>> {
        // A run without readable weights fails where it reads them.
        let weights = self.pretrained().and_then(|path| StoredWeights::open(path).ok());
        let Some(weights) = weights else { return Ok(None) };
        let mut common = None;
        for name in model.adapted_weights()? {
            let dtype = weights.dtype(&name);
            if !matches!(dtype, Some(DType::BF16 | DType::F16))
                || common.is_some_and(|c| c != dtype)
            {
                return Ok(None);
            }
            common = Some(dtype);
        }
        Ok(common.flatten())
    }

    /// Returns the folder of the pretrained weights, or `None` for random weights.
    pub(crate) fn pretrained(&self) -> Option<&Path> {
        match self.finetune.init {
            Some(_) => None,
            None => self.finetune.folder.as_deref(),
        }
    }

    /// Returns the seed of random weights.
    pub(crate) fn init_seed(&self) -> Seed {
        Seed::new(self.finetune.init.unwrap_or(self.seed)).derive(INIT_STREAM)
    }

    /// Returns true if sequences share the rows of a batch.
    pub(crate) fn is_packed(&self) -> bool {
        self.finetune.rows == Rows::Packed
    }

    /// Returns the batching of sequences.
    fn batching(&self) -> Batching {
        let RunInputs { rows, batch_size, context, accumulate, .. } = self.finetune;
        let limit = self.finetune.max_tokens_per_batch.map(|limit| limit.min(self.max_tokens));
        // Without a limit, a global batch may need one micro-batch that has most of its tokens.
        let share = self.max_tokens / accumulate.unwrap_or(1);
        let bucketed = Batching::bucketed(self.max_tokens);
        let is_grid = accumulate.is_some() || limit.is_some();
        match (rows, batch_size) {
            (Rows::Padded, None) if !is_grid => bucketed,
            (Rows::Padded, None) => Batching {
                strategy: DynamicBatchStrategy::PadToMax,
                max_tokens: limit.unwrap_or(share),
                is_grid,
                accumulate: limit.map(|limit| self.max_tokens / limit).or(accumulate),
                ..bucketed
            },
            (Rows::Padded, Some(_)) => Batching {
                strategy: DynamicBatchStrategy::PadToMax,
                max_tokens: limit.unwrap_or(self.max_tokens),
                max_batch_size: batch_size,
                is_grid,
                accumulate,
                ..bucketed
            },
            (Rows::Packed, _) => {
                let max_rows = self.max_tokens / context as u64;
                let n_batches = (limit.unwrap_or(share) / context as u64).max(1);
                Batching {
                    strategy: DynamicBatchStrategy::Pack(Packing::BestFit),
                    max_tokens: context as u64,
                    n_batches,
                    accumulate: limit.map(|_| (max_rows / n_batches).max(1)).or(accumulate),
                    ..bucketed
                }
            }
        }
    }

    /// Plans the model of the run over `world_size` devices.
    ///
    /// # Errors
    ///
    /// [`SpecError::Model`] or [`SpecError::UnknownLayer`] if there is no such model, and
    /// [`Error::Plan`] if it cannot be sharded so.
    pub fn plan(&self, sharding: Option<&Sharding>, world_size: WorldSize) -> Result<RunPlan> {
        let parameters = self.trained_model()?.parameters()?;
        RunPlan::new(parameters, sharding, self.recipe.precision(), world_size)
    }

    /// Reads the texts again, and returns the batches of the first epoch.
    ///
    /// # Errors
    ///
    /// [`RunError::TextMismatch`] if the texts have changed, and the errors of reading them.
    pub fn first_epoch(&self) -> Result<FirstEpoch> {
        let folder = self.finetune.open_folder()?;
        let seed = Seed::new(self.seed);
        let texts = self.finetune.read_texts(&folder, &self.data, seed, None)?;
        if texts.fingerprint != self.text {
            return Err(RunError::TextMismatch.into());
        }
        let lengths = texts.train.lengths();
        let schedule = self.training_schedule(lengths.clone(), &texts.part_lens)?;
        let (report, micro_batches) = schedule.first_epoch()?;
        Ok(FirstEpoch { lengths, micro_batches, report })
    }

    /// Returns the work of the first process in the latest session, if the session recorded its memory;
    /// `micro_batches` come from [`first_epoch`](Self::first_epoch).
    ///
    /// # Errors
    ///
    /// [`SpecError::Model`] if there is no such model.
    pub fn workload<'a>(
        &'a self,
        parameters: &'a [ParameterInfo],
        micro_batches: &'a [Vec<Batch>],
    ) -> Result<Option<Workload<'a>>> {
        let session = self.session();
        let Some(base_bytes) = session.base_bytes else { return Ok(None) };
        Ok(Some(Workload {
            sizes: self.trained_model()?.sizes(),
            precision: self.recipe.precision(),
            parameters,
            sharding: session.sharding.as_ref(),
            micro_batches,
            is_packed: self.is_packed(),
            accumulates: self.finetune.accumulates(),
            check: false,
            world_size: session.world_size,
            // The file may have been edited, so the number is limited.
            ranks: (0, session.devices_here.min(session.world_size)),
            base_bytes,
        }))
    }

    /// Plans steps that read all sequences of these lengths in each epoch.
    pub(crate) fn schedule(&self, lengths: Vec<u64>) -> Result<BatchSchedule> {
        BatchSchedule::new(lengths, self.order_seed(), &self.batching())
    }

    /// Plans the steps of the training sequences, which are mixed if there are several texts.
    pub(crate) fn training_schedule(
        &self,
        lengths: Vec<u64>,
        part_lens: &[u64],
    ) -> Result<BatchSchedule> {
        let mixture = &self.finetune.mixture;
        if mixture.is_empty() {
            return self.schedule(lengths);
        }
        BatchSchedule::mixed(lengths, part_lens, mixture, self.order_seed(), &self.batching())
    }

    fn order_seed(&self) -> Seed {
        Seed::new(self.seed).derive(ORDER_STREAM)
    }

    /// Returns the texts with their weights at a step of an epoch; empty for short stories.
    pub fn texts(&self, epoch: u64, step: u64) -> Vec<TextSource> {
        let weights = self.finetune.weights_at(epoch, step).iter().copied().map(Some);
        let weights = weights.chain(iter::repeat(None));
        let texts = self.data.iter().cloned().zip(weights);
        texts.map(|(path, weight)| TextSource { path, weight }).collect()
    }

    /// Returns a hash of everything that affects the parameters, in hexadecimal digits.
    pub fn identity(&self) -> String {
        let mut fingerprint: Fingerprint =
            [self.seed, self.steps, self.max_tokens].into_iter().collect();
        fingerprint.write_bytes(self.text.as_bytes());
        fingerprint.write_bytes(self.finetune.started().to_json().as_bytes());
        fingerprint.write_bytes(self.recipe.to_json().as_bytes());
        fingerprint.to_string()
    }

    /// Returns the latest session. Every run that was read or opened for training has one.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    pub fn session(&self) -> &Session {
        self.sessions.last().expect("every run that was read or started has a session")
    }

    /// Sets the identity.
    #[must_use]
    pub(crate) fn sealed(self) -> Self {
        Self { identity: self.identity(), ..self }
    }

    /// Adds a session, and drops sessions that started at or after its first step.
    #[must_use]
    pub(crate) fn with_session(mut self, session: Session) -> Self {
        self.sessions.retain(|earlier| earlier.first_step < session.first_step);
        self.sessions.push(session);
        self
    }
}

/// Serializes one path as itself, none as null, and several as a list.
mod paths {
    use std::path::PathBuf;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged, expecting = "data must be a path, or a list of paths")]
    enum Paths {
        One(PathBuf),
        Several(Vec<PathBuf>),
    }

    pub(super) fn serialize<S: Serializer>(
        paths: &[PathBuf],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match paths {
            [] => serializer.serialize_none(),
            [path] => path.serialize(serializer),
            _ => paths.serialize(serializer),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<PathBuf>, D::Error> {
        Ok(match Option::deserialize(deserializer)? {
            None => Vec::new(),
            Some(Paths::One(path)) => vec![path],
            Some(Paths::Several(paths)) => paths,
        })
    }
}

/// Returns the name of a variant without fields.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
pub(crate) fn variant_name(variant: &impl Serialize) -> String {
    let json = serde_json::to_value(variant).expect("a name is JSON");
    json.as_str().expect("a variant without fields is a name").to_owned()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{collections::BTreeSet, fs, sync::Arc};

    use serde_json::json;

    use super::*;
    use crate::{folder::Folder, text::examples::Overlong};

    fn session(first_step: u64) -> Session {
        Session {
            first_step,
            world_size: 2,
            devices_here: 2,
            on_processors: true,
            sharding: None,
            base_bytes: None,
            step_traffic: None,
            peak_bytes: None,
        }
    }

    fn inputs() -> RunInputs {
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 8,
            "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
            "eos_token_id": 256,
        });
        let folder = Folder::from_config(config.to_string()).unwrap();
        RunInputs {
            folder: None,
            config,
            weights: None,
            init: Some(7),
            tokenizer: folder.tokenizer().fingerprint(),
            context: 128,
            rows: Rows::Padded,
            overlong: Overlong::Split,
            batch_size: None,
            accumulate: None,
            max_tokens_per_batch: None,
            validation: None,
            merge: true,
            mixture: Vec::new(),
        }
    }

    pub(crate) fn spec() -> Spec {
        let spec = Spec {
            format_version: 1,
            seed: 7,
            steps: 20,
            data: Vec::new(),
            text: String::new(),
            max_tokens: 4096,
            allow_non_finite: false,
            finetune: inputs(),
            recipe: Recipe::default(),
            sessions: vec![session(0)],
            identity: String::new(),
            model_files: vec![],
            model_fingerprint: None,
        };
        spec.sealed()
    }

    #[test]
    fn sessions_of_lost_steps_are_dropped() {
        let steps = [8, 12, 8];
        let resumed =
            steps.into_iter().fold(spec(), |known, step| known.with_session(session(step)));
        assert_eq!(resumed.sessions, [session(0), session(8)]);
    }

    #[test]
    fn identity_differs_between_runs() {
        let run = spec();
        let other = RunInputs { init: Some(8), ..inputs() };
        let clipped = serde_json::from_str(r#"{"max_grad_norm": 1}"#).unwrap();
        let others = [
            Spec { seed: 8, ..run.clone() },
            Spec { steps: 21, ..run.clone() },
            Spec { max_tokens: 4097, ..run.clone() },
            Spec { text: String::from("0"), ..run.clone() },
            Spec { recipe: clipped, ..run.clone() },
            Spec { finetune: other, ..run.clone() },
        ];
        let mut identities: BTreeSet<String> = others.iter().map(Spec::identity).collect();
        identities.insert(run.identity());
        assert_eq!(identities.len(), 7);
        // The identity does not depend on the path of the texts and on the devices.
        let moved = Spec { data: vec!["text".into()], sessions: vec![], ..run.clone() };
        assert_eq!(moved.identity(), run.identity());
    }

    #[test]
    fn micro_batches_stay_below_their_limit() {
        let lengths: Vec<u64> = (0..200).map(|n| 1 + n * 37 % 128).collect();
        for (rows, batch_size, limit) in [
            (Rows::Padded, None, 300),
            (Rows::Padded, Some(12), 300),
            (Rows::Packed, None, 300),
            (Rows::Packed, Some(7), 128),
        ] {
            let max_tokens_per_batch = Some(limit);
            let finetune = RunInputs { rows, batch_size, max_tokens_per_batch, ..inputs() };
            let max_tokens = batch_size.map_or(1000, |rows| rows * 128);
            let run = Spec { max_tokens, finetune, ..spec() };
            let schedule = BatchSchedule::new(lengths.clone(), Seed::new(1), &run.batching());
            let steps = Arc::new(schedule.unwrap());
            let mut n_micro_batches = BTreeSet::new();
            for step in steps.steps(None).unwrap().take(20).map(Result::unwrap) {
                let micro_batches = step.micro_batches.iter();
                let tokens: Vec<u64> = micro_batches.map(|rows| padded_tokens(rows)).collect();
                assert!(tokens.iter().all(|&tokens| tokens <= limit), "{rows:?}, {tokens:?}");
                assert!(tokens.iter().sum::<u64>() <= max_tokens, "{rows:?}, {tokens:?}");
                n_micro_batches.insert(tokens.len());
            }
            assert!(n_micro_batches.iter().any(|&n| n > 1), "{rows:?}");
        }
    }

    #[test]
    fn packed_rows_divide_over_micro_batches() {
        for (batch_size, accumulate, limit, max_tokens, is_valid) in [
            (7, None, None, 7 * 128, true),
            (7, None, Some(128), 7 * 128, true),
            (7, None, Some(256), 7 * 128, false),
            (7, Some(2), None, 7 * 128, false),
            (8, Some(2), None, 8 * 128, true),
            (8, None, Some(300), 8 * 128, true),
            (8, None, None, 1000, false),
        ] {
            let finetune = RunInputs {
                rows: Rows::Packed,
                batch_size: Some(batch_size),
                accumulate,
                max_tokens_per_batch: limit,
                ..inputs()
            };
            let checked = Spec { max_tokens, finetune, ..spec() }.check_rows();
            assert_eq!(checked.is_ok(), is_valid, "{batch_size} {accumulate:?} {limit:?}");
        }
    }

    fn padded_tokens(batches: &[Batch]) -> u64 {
        batches.iter().map(Batch::padded_tokens).sum()
    }

    #[test]
    fn invalid_mixtures_are_damage() {
        let phase = |from_epoch, weights: &[u64]| {
            let weights = weights.to_vec();
            MixtureWeights { from_epoch, from_step: 0, weights }
        };
        let read = |n_texts, mixture| {
            let home = tempfile::tempdir().unwrap();
            let finetune = RunInputs { mixture, ..inputs() };
            let run = Spec { data: vec!["a".into(); n_texts], finetune, ..spec() }.sealed();
            run.write(home.path()).unwrap();
            Spec::read(home.path()).map(|found| assert_eq!(found.unwrap(), run))
        };
        read(0, vec![]).unwrap();
        read(1, vec![]).unwrap();
        let later = MixtureWeights { from_step: 9, ..phase(2, &[1, 2]) };
        read(2, vec![phase(0, &[7, 3]), phase(2, &[1, 1 << 20]), later]).unwrap();
        for (n_texts, mixture) in [
            (2, vec![]),
            (1, vec![phase(0, &[1])]),
            (2, vec![phase(1, &[7, 3])]),
            (2, vec![phase(0, &[7, 0])]),
            (2, vec![phase(0, &[7, 3, 1])]),
            (2, vec![phase(0, &[7, 3]), phase(0, &[1, 1])]),
        ] {
            let error = read(n_texts, mixture).unwrap_err();
            assert!(matches!(error, Error::Run(RunError::Description { .. })), "{error}");
        }
    }

    #[test]
    fn changed_settings_are_rejected() {
        let parent = tempfile::tempdir().unwrap();
        let run = spec();
        run.write(parent.path()).unwrap();
        assert_eq!(Spec::read(parent.path()).unwrap().unwrap(), run);
        let file = parent.path().join(FILE);
        let written = fs::read_to_string(&file).unwrap();
        for (from, to) in [
            ("\"seed\": 7", "\"seed\": 5"),
            ("\"steps\": 20", "\"steps\": 21"),
            ("\"first_step\": 0", "\"first_step\": 2"),
            ("\"identity\"", "\"identity\" "),
        ] {
            assert!(written.contains(from));
            fs::write(&file, written.replace(from, to)).unwrap();
            let error = Spec::read(parent.path()).unwrap_err().to_string();
            assert!(error.contains("run.json is damaged"), "{error}");
        }
    }
}
