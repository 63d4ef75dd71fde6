//! The model and the texts of a run.

use std::path::PathBuf;

use core_types::{Fingerprint, Seed};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    data::{
        dataset::Rows,
        schedule::{MixtureWeights, VALIDATION_STREAM},
    },
    error::{Result, run::RunError, spec::SpecError},
    folder::Folder,
    models::{Decoder, DecoderConfig},
    text::{
        examples::{Examples, Overlong},
        source::is_valid,
        stories,
        tokenizer::Tokenizer,
    },
};

/// The model of a run, and the layout of its texts, as `run.json` records them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunInputs {
    /// Folder of the model, or `None` for the built-in model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
    /// Fields of `config.json`.
    pub config: Value,
    /// Fingerprint of the weights in hexadecimal digits, or `None` for random weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<String>,
    /// Seed of random weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<u64>,
    /// Fingerprint of the tokenizer in hexadecimal digits.
    pub tokenizer: String,
    /// Maximum tokens of a sequence.
    pub context: usize,
    /// Layout of sequences in rows.
    pub rows: Rows,
    /// Treatment of overlong texts.
    pub overlong: Overlong,
    /// Number of sequences or packed rows in a step, if limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u64>,
    /// Number of micro-batches in a step, if gradients are accumulated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accumulate: Option<u64>,
    /// Maximum padded tokens of a micro-batch, if their number depends on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens_per_batch: Option<u64>,
    /// Held-out examples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<Validation>,
    /// Whether the run ends with a merged model besides the adapters.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub merge: bool,
    /// Weights of several texts, in the order of their epochs; empty for a single text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixture: Vec<MixtureWeights>,
}

/// The examples of a run.
#[derive(Debug)]
pub(crate) struct RunTexts {
    /// Fingerprint of all examples in hexadecimal digits.
    pub(crate) fingerprint: String,
    /// Training examples.
    pub(crate) train: Examples,
    /// Number of training examples of each text.
    pub(crate) part_lens: Vec<u64>,
    /// Held-out examples.
    pub(crate) held_out: Option<Examples>,
}

/// The share of held-out examples, and the interval of validations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Fraction of all examples.
    pub fraction: f64,
    /// Number of steps between validations.
    pub every: u64,
}

impl RunInputs {
    /// Returns the number of micro-batches in a step.
    pub(crate) fn micro_batches(&self) -> usize {
        self.accumulate.map_or(1, |n| usize::try_from(n).unwrap_or(usize::MAX))
    }

    /// Returns true if a step may have several micro-batches.
    pub(crate) fn accumulates(&self) -> bool {
        self.micro_batches() > 1 || self.max_tokens_per_batch.is_some()
    }

    /// Returns the model without adapters.
    ///
    /// # Errors
    ///
    /// [`SpecError::Model`] if the model is not supported.
    pub(crate) fn decoder(&self) -> Result<Decoder> {
        let config = DecoderConfig::from_json(&self.config.to_string());
        let decoder = config.and_then(Decoder::from_config).map_err(SpecError::Model)?;
        Ok(decoder.with_context(self.context))
    }

    /// Opens the folder of the model.
    ///
    /// # Errors
    ///
    /// The errors of [`Folder::open`].
    pub(crate) fn open_folder(&self) -> Result<Folder> {
        match &self.folder {
            Some(path) => Folder::open(path),
            None => Folder::from_config(self.config.to_string()),
        }
    }

    /// Reads the examples under these paths within `max_bytes`, or generates short stories. The
    /// validation gets its share of every text.
    ///
    /// # Errors
    ///
    /// The errors of [`Examples::read`] and [`Examples::split`].
    pub(crate) fn read_texts(
        &self,
        folder: &Folder,
        paths: &[PathBuf],
        seed: Seed,
        max_bytes: Option<u64>,
    ) -> Result<RunTexts> {
        let parts = self.read_parts(folder.tokenizer(), paths, max_bytes)?;
        let mut texts = RunTexts {
            fingerprint: joint_fingerprint(&parts),
            train: Examples::default(),
            part_lens: Vec::with_capacity(parts.len()),
            held_out: None,
        };
        for part in parts {
            let train = match self.validation {
                Some(Validation { fraction, .. }) => {
                    let (train, held_out) = part.split(fraction, seed.derive(VALIDATION_STREAM))?;
                    texts.held_out.get_or_insert_default().append(held_out);
                    train
                }
                None => part,
            };
            texts.part_lens.push(train.len());
            texts.train.append(train);
        }
        Ok(texts)
    }

    fn read_parts(
        &self,
        tokenizer: &Tokenizer,
        paths: &[PathBuf],
        max_bytes: Option<u64>,
    ) -> Result<Vec<Examples>> {
        let Self { context, overlong, .. } = *self;
        if paths.is_empty() {
            let stories = stories::stories();
            return Ok(vec![Examples::from_texts(stories, tokenizer, context, overlong)?]);
        }
        let mut parts = Vec::with_capacity(paths.len());
        let mut n_tokens = 0;
        for path in paths {
            let part =
                Examples::read_beside(n_tokens, path, tokenizer, context, overlong, max_bytes)?;
            n_tokens += part.lengths().iter().sum::<u64>();
            parts.push(part);
        }
        Ok(parts)
    }

    /// Returns the weights of several texts at a step of an epoch; empty for a single text.
    pub(crate) fn weights_at(&self, epoch: u64, step: u64) -> &[u64] {
        let is_begun = |phase: &&MixtureWeights| phase.start() <= (epoch, step);
        self.mixture.iter().rfind(is_begun).map_or(&[], |phase| &phase.weights)
    }

    /// Sets the weights of several texts from a step of an epoch on.
    pub(crate) fn set_weights_from(&mut self, from: MixtureWeights) {
        self.mixture.retain(|phase| phase.start() < from.start());
        if self.mixture.last().is_none_or(|last| last.weights != from.weights) {
            self.mixture.push(from);
        }
    }

    /// Returns true if there are valid weights for `n_texts` texts from the first step on.
    pub(crate) fn has_valid_mixture(&self, n_texts: usize) -> bool {
        let is_valid_phase = |phase: &MixtureWeights| {
            phase.weights.len() == n_texts && phase.weights.iter().copied().all(is_valid)
        };
        match self.mixture.first() {
            None => n_texts < 2,
            Some(first) => {
                n_texts > 1
                    && first.start() == (0, 0)
                    && self.mixture.iter().all(is_valid_phase)
                    && self.mixture.is_sorted_by(|left, right| left.start() < right.start())
            }
        }
    }

    /// Returns the inputs with which the run started. Weights may change when a run is resumed.
    pub(crate) fn started(&self) -> Self {
        Self { mixture: self.mixture.first().cloned().into_iter().collect(), ..self.clone() }
    }

    /// Lowers the context to the length of the longest example: a longer context would only cost memory.
    /// Packed rows keep a minimum length.
    #[must_use]
    pub(crate) fn for_longest(self, longest: u64) -> Self {
        /// Minimum length of packed rows. Most examples fit into such a row several times.
        const MIN_ROW_LENGTH: usize = 2048;
        let longest = usize::try_from(longest).unwrap_or(usize::MAX);
        let needed = match self.rows {
            Rows::Padded => longest,
            Rows::Packed => longest.max(MIN_ROW_LENGTH),
        };
        Self { context: self.context.min(needed.max(2)), ..self }
    }

    /// Checks that a folder holds the initial model of the run.
    ///
    /// # Errors
    ///
    /// [`RunError::ModelMismatch`] if it holds another model.
    pub(crate) fn check_folder(&self, folder: &Folder) -> Result<()> {
        let is_same = folder.config()? == self.config
            && folder.tokenizer().fingerprint() == self.tokenizer
            && (self.init.is_some() || Some(folder.weights_fingerprint()?) == self.weights);
        if is_same {
            return Ok(());
        }
        Err(RunError::ModelMismatch { path: folder.path().into() }.into())
    }

    /// Returns the inputs without the path of the folder as JSON, for comparison between runs and
    /// processes.
    #[expect(clippy::expect_used, reason = "its fields are names and numbers")]
    pub fn to_json(&self) -> String {
        let without_folder = Self { folder: None, ..self.clone() };
        serde_json::to_string(&without_folder).expect("all fields are JSON values")
    }
}

/// Returns a fingerprint of the examples and of the text of each.
fn joint_fingerprint(parts: &[Examples]) -> String {
    if let [part] = parts {
        return part.fingerprint();
    }
    let mut fingerprint = Fingerprint::new();
    for part in parts {
        fingerprint.write_bytes(part.fingerprint().as_bytes());
    }
    fingerprint.to_string()
}
