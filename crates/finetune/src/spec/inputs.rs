//! The model and the texts of a run.

use std::path::{Path, PathBuf};

use core_types::Seed;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    data::{dataset::Rows, schedule::VALIDATION_STREAM},
    error::{Result, run::RunError, spec::SpecError},
    folder::Folder,
    models::{Llama, LlamaConfig},
    text::{
        examples::{Examples, Overlong},
        stories,
    },
};

/// The default layers of adapters, as in PEFT.
pub(crate) const ADAPTED: [&str; 2] = ["q_proj", "v_proj"];

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
    /// Held-out examples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<Validation>,
    /// Whether the run ends with a merged model besides the adapters.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub merge: bool,
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
    /// Returns the model without adapters.
    ///
    /// # Errors
    ///
    /// [`SpecError::Model`] if the model is not supported.
    pub(crate) fn llama(&self) -> Result<Llama> {
        let config = LlamaConfig::from_json(&self.config.to_string());
        Ok(config.and_then(Llama::from_config).map_err(SpecError::Model)?)
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

    /// Reads the examples under `path` within `max_bytes`, or generates short stories. Returns their fingerprint, the
    /// training examples, and the held-out examples.
    ///
    /// # Errors
    ///
    /// The errors of [`Examples::read`] and [`Examples::split`].
    pub(crate) fn examples(
        &self,
        folder: &Folder,
        path: Option<&Path>,
        seed: Seed,
        max_bytes: Option<u64>,
    ) -> Result<(String, Examples, Option<Examples>)> {
        let tokenizer = folder.tokenizer();
        let context = self.context;
        let examples = match path {
            Some(path) => Examples::read(path, tokenizer, context, self.overlong, max_bytes)?,
            None => Examples::from_texts(stories::stories(), tokenizer, context, self.overlong)?,
        };
        let fingerprint = examples.fingerprint();
        let Some(Validation { fraction, .. }) = self.validation else {
            return Ok((fingerprint, examples, None));
        };
        let (train, held_out) = examples.split(fraction, seed.derive(VALIDATION_STREAM))?;
        Ok((fingerprint, train, Some(held_out)))
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
