//! The folder of a model: its sizes, its weights and its tokenizer.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

use candle_distributed::models::{Llama, LlamaConfig};
use serde::Deserialize;

use crate::{
    error::{Error, Result, WithHint},
    hf::{
        files::{CONFIG, refused},
        tokenizer::{self, Tokenizer},
    },
    hint, input,
};

/// How errors name the model that comes with the program.
const BUILT_IN: &str = "the model of this program";

/// The weights, in one file or in those of an index.
const ONE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Endings of files with weights that are not read here.
const OTHER_WEIGHTS: [&str; 5] = ["bin", "pt", "pth", "gguf", "h5"];

/// A model of the Llama family as Hugging Face's tools write and read it.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    config: String,
    llama: Llama,
    tokenizer: Tokenizer,
}

impl Folder {
    /// Reads all but the weights.
    ///
    /// A folder that holds a `config.json` alone is a model that nobody has trained: its tokens are
    /// [bytes](crate::hf::byte_tokenizer), and whoever trains it makes its weights at random.
    ///
    /// # Errors
    ///
    /// If the model is none of the Llama family, if a text would have a token that the model does not
    /// know, or if no token ends a text.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = path.join(CONFIG);
        if !path.is_dir() {
            let none = Error::usage(format!("{} is not a folder", path.display()));
            return Err(none.hinted(hint::HF_FOLDER));
        }
        let config = input::read_file(&file).with_hint(hint::HF_FOLDER)?;
        let llama = LlamaConfig::from_json(&config).and_then(Llama::from_config);
        let llama = llama.map_err(|fault| refused(&file, fault).hinted(hint::FAMILY))?;
        let vocab_size = llama.config().vocab_size;
        let tokenizer = if path.join(tokenizer::FILE).exists() || has_weights(path)? {
            Tokenizer::open(path, &config, vocab_size)?
        } else {
            Tokenizer::bytes(path, &config, vocab_size)?
        };
        Ok(Self { path: path.to_owned(), config, llama, tokenizer })
    }

    /// Makes a folder that lies nowhere, of a `config.json` whose tokens are bytes.
    ///
    /// # Errors
    ///
    /// As of [`open`](Self::open).
    pub(crate) fn of_config(config: String) -> Result<Self> {
        let path = Path::new(BUILT_IN);
        let llama = LlamaConfig::from_json(&config).and_then(Llama::from_config);
        let llama = llama.map_err(|fault| refused(path, fault))?;
        let tokenizer = Tokenizer::bytes(path, &config, llama.config().vocab_size)?;
        Ok(Self { path: path.to_owned(), config, llama, tokenizer })
    }

    /// Where the folder is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The text of `config.json`.
    pub(crate) fn config_json(&self) -> &str {
        &self.config
    }

    /// The model, whose [`config`](Llama::config) has its sizes.
    pub(crate) fn llama(&self) -> &Llama {
        &self.llama
    }

    /// What makes tokens of texts.
    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The safetensors files of the weights, in the order of their names.
    ///
    /// # Errors
    ///
    /// If there are none, or if the index names one that is not there.
    pub(crate) fn weights(&self) -> Result<Vec<PathBuf>> {
        let one_file = self.path.join(ONE_FILE);
        if one_file.is_file() {
            return Ok(vec![one_file]);
        }
        let index = self.path.join(INDEX);
        if !index.is_file() {
            return Err(self.without_weights());
        }
        let Index { weight_map } = input::read_json(&index, "where the weights of a model are")
            .with_hint(hint::NOT_WHOLE)?;
        let names: BTreeSet<String> = weight_map.into_values().collect();
        if names.is_empty() {
            return Err(refused(&index, "it names no file").hinted(hint::NO_WEIGHTS));
        }
        names.into_iter().map(|name| self.shard(&index, &name)).collect()
    }

    fn shard(&self, index: &Path, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        let is_beside = Path::new(name).file_name() == Some(OsStr::new(name));
        if is_beside && path.is_file() {
            return Ok(path);
        }
        let fault = format!("{name:?}, where it has weights, is no file beside it");
        Err(refused(index, fault).hinted(hint::NOT_WHOLE))
    }

    fn without_weights(&self) -> Error {
        let path = self.path.display();
        match other_weights(&self.path) {
            Ok(Some(other)) => {
                let message = format!("{path} has weights in {other} alone");
                Error::usage(message).hinted(hint::OTHER_FORMAT)
            }
            Ok(None) => Error::usage(format!("{path} has no {ONE_FILE} and no {INDEX}"))
                .hinted(hint::NO_WEIGHTS),
            Err(error) => error,
        }
    }
}

/// Which tensor is in which file.
#[derive(Debug, Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Whether a folder has weights of any kind.
fn has_weights(path: &Path) -> Result<bool> {
    let has_own = [ONE_FILE, INDEX].iter().any(|name| path.join(name).exists());
    Ok(has_own || other_weights(path)?.is_some())
}

/// A file with weights that are not read here, by name.
fn other_weights(path: &Path) -> Result<Option<String>> {
    let entries = fs::read_dir(path).map_err(|source| Error::read(path, source))?;
    let mut found = BTreeSet::new();
    for entry in entries {
        let name = entry.map_err(|source| Error::read(path, source))?.file_name();
        let ending = Path::new(&name).extension().and_then(OsStr::to_str);
        if ending.is_some_and(|ending| OTHER_WEIGHTS.contains(&ending)) {
            found.insert(name.to_string_lossy().into_owned());
        }
    }
    Ok(found.pop_first())
}
