//! Which model a run trains on which texts, as `run.json` records it.

use std::path::{Path, PathBuf};

use candle_distributed::{
    models::{Llama, LlamaConfig},
    types::{Fingerprint, Seed},
};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    error::{Error, Result},
    hf::{
        examples::{Examples, Overlong},
        folder::Folder,
    },
    hint,
    train::{data::VALIDATION_STREAM, model_file, stories},
};

/// The layers that have adapters unless others are asked for, as in PEFT.
pub(crate) const ADAPTED: [&str; 2] = ["q_proj", "v_proj"];

/// How a model is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Finetune {
    /// The folder that the model comes from; `None` if it is the one of this program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) folder: Option<PathBuf>,
    /// Its `config.json`.
    pub(crate) config: Value,
    /// The fingerprint of its weights, in hexadecimal digits; `None` if they were made at random.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) weights: Option<String>,
    /// The seed of random weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) init: Option<u64>,
    /// The fingerprint of its tokenizer, in hexadecimal digits.
    pub(crate) tokenizer: String,
    /// The most tokens of a sequence.
    pub(crate) context: usize,
    pub(crate) rows: Rows,
    pub(crate) overlong: Overlong,
    /// The number of sequences in a step, or of packed rows, if that is what was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) batch_size: Option<u64>,
    /// The examples by which it is seen how much was learnt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) validation: Option<Validation>,
    /// Whether a model with the effect of its adapters is written beside them, if it has some.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) merge: bool,
}

/// How sequences lie in the rows of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Rows {
    /// A row for each, padded to the longest of its batch
    #[default]
    Padded,
    /// As many in a row as fit the context, none of which sees another
    Packed,
}

/// Which examples are held out, and how often the model is tried on them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Validation {
    /// Of all examples.
    pub(crate) fraction: f64,
    /// The number of steps from one time to the next.
    pub(crate) every: u64,
}

impl Finetune {
    /// The model, without adapters.
    pub(crate) fn llama(&self) -> Result<Llama> {
        let config = self.config.to_string();
        let llama = LlamaConfig::from_json(&config).and_then(Llama::from_config);
        llama.map_err(|fault| Error::usage(fault.to_string()))
    }

    /// The folder of the model, where it is now.
    pub(crate) fn open_folder(&self) -> Result<Folder> {
        match &self.folder {
            Some(path) => Folder::open(path),
            None => Folder::of_config(self.config.to_string()),
        }
    }

    /// The examples under `path`, or short stories, in two parts: those to learn from, and those that
    /// are held out.
    pub(crate) fn examples(
        &self,
        folder: &Folder,
        path: Option<&Path>,
        seed: Seed,
    ) -> Result<(String, Examples, Option<Examples>)> {
        let (tokenizer, context) = (folder.tokenizer(), self.context);
        let read = match path {
            Some(path) => Examples::read(path, tokenizer, context, self.overlong)?,
            None => Examples::of_texts(stories::stories(), tokenizer, context, self.overlong)?,
        };
        let fingerprint = read.fingerprint();
        let Some(Validation { fraction, .. }) = self.validation else {
            return Ok((fingerprint, read, None));
        };
        let (train, held_out) = read.split(fraction, seed.derive(VALIDATION_STREAM))?;
        Ok((fingerprint, train, Some(held_out)))
    }

    /// The same for examples whose longest has so many tokens: no step needs room for longer ones,
    /// however many positions the model has.
    pub(crate) fn for_longest(self, longest: u64) -> Self {
        /// As long as rows are that most examples can share.
        const ROW: usize = 2048;
        let longest = usize::try_from(longest).unwrap_or(usize::MAX);
        let room = match self.rows {
            Rows::Padded => longest,
            Rows::Packed => longest.max(ROW),
        };
        Self { context: self.context.min(room.max(2)), ..self }
    }

    /// Refuses a folder that is not the one that the run started with.
    pub(crate) fn check_folder(&self, folder: &Folder) -> Result<()> {
        let is_same = config_of(folder)? == self.config
            && tokenizer_fingerprint(folder) == self.tokenizer
            && (self.init.is_some() || weights_fingerprint(folder)? == self.weights);
        if is_same {
            return Ok(());
        }
        let name = folder.path().display();
        let other = Error::usage(format!("{name} is not the model that the run began with"));
        Err(other.hinted(hint::OTHER_MODEL))
    }

    /// All of it in a form that no other has, but for the place of its folder.
    #[expect(clippy::expect_used, reason = "its fields are names and numbers")]
    pub(crate) fn words(&self) -> String {
        let anywhere = Self { folder: None, ..self.clone() };
        serde_json::to_string(&anywhere).expect("it is made of what JSON has")
    }
}

/// The `config.json` of a folder.
pub(crate) fn config_of(folder: &Folder) -> Result<Value> {
    let what = "the properties of a model";
    serde_json::from_str(folder.config_json())
        .map_err(|source| Error::json(folder.path(), what, source))
}

/// The fingerprint of a folder's weights.
pub(crate) fn weights_fingerprint(folder: &Folder) -> Result<Option<String>> {
    let mut fingerprint = Fingerprint::new();
    for path in folder.weights()? {
        let of_file = model_file::fingerprint(&path);
        fingerprint.write_bytes(of_file.map_err(|source| Error::read(&path, source))?.as_bytes());
    }
    Ok(Some(format!("{:016x}", fingerprint.finish())))
}

/// The fingerprint of a folder's tokenizer.
pub(crate) fn tokenizer_fingerprint(folder: &Folder) -> String {
    let mut fingerprint = Fingerprint::new();
    for (name, content) in folder.tokenizer().files() {
        fingerprint.write_bytes(name.as_bytes());
        fingerprint.write_bytes(content);
    }
    format!("{:016x}", fingerprint.finish())
}
