//! The folder of a model: its configuration, its weights and its tokenizer.

use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device};
use core_types::Fingerprint;
use dist_checkpoint::{StoredWeights, TensorInfo};
use fsdp_plan::ParameterInfo;
use serde_json::Value;

use crate::{
    data::model::Model,
    error::{Error, Result, folder::FolderError},
    files::{self, CONFIG},
    models::{Decoder, DecoderConfig},
    text::tokenizer::{self, Tokenizer},
};

/// The file with all weights, or the index of several files.
pub(crate) const ONE_FILE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The file of the weights of adapters in their folder.
pub(crate) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// Extensions of unsupported weight files.
const UNSUPPORTED_EXTENSIONS: [&str; 5] = ["bin", "pt", "pth", "gguf", "h5"];

/// A model of a supported family as Hugging Face's tools write and read it.
///
/// # Examples
///
/// A folder with only a `config.json` is a new byte model:
///
/// ```
/// use finetune::Folder;
///
/// # let home = tempfile::tempdir()?;
/// # let path = home.path();
/// let config = r#"{
///     "architectures": ["LlamaForCausalLM"], "vocab_size": 257, "hidden_size": 8,
///     "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
///     "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
///     "eos_token_id": 256
/// }"#;
/// std::fs::write(path.join("config.json"), config)?;
/// let folder = Folder::open(path)?;
/// assert_eq!(folder.decoder().config().layers.len(), 2);
/// assert_eq!(folder.tokenizer().decode(&[97, 98], false)?, "ab");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    config: String,
    decoder: Decoder,
    tokenizer: Tokenizer,
}

impl Folder {
    /// Reads everything in a folder except the weights.
    ///
    /// A folder with only a `config.json` is an untrained model. Its tokens are bytes, and training
    /// starts from random weights.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Folder`] if the model is not of a supported family, or if a file in the folder
    /// of a run has changed since the run wrote it, and [`Error::Tokenizer`]
    /// if the tokenizer has a token outside the model's vocabulary or no end-of-text token.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Err(FolderError::NotAFolder { path: path.into() }.into());
        }
        let (config, decoder) = read_config(path)?;
        let vocab_size = decoder.config().vocab_size;
        let tokenizer = if path.join(tokenizer::FILE).exists() || has_weights(path)? {
            Tokenizer::open(path, &config, vocab_size)?
        } else {
            Tokenizer::bytes(path, &config, vocab_size)?
        };
        let folder = Self { path: path.to_owned(), config, decoder, tokenizer };
        // Weights that cannot be opened are an error of `weights`.
        if let Ok(weights) = folder.weights() {
            check_files_beside(path, &weights)?;
        }
        Ok(folder)
    }

    /// Lists the parameters of the model that the `config.json` of a folder describes, in its dtype and in
    /// the order of their names. Reads no other file.
    ///
    /// # Errors
    ///
    /// [`FolderError::Config`] if it cannot be read, and [`FolderError::Model`] if the model is not
    /// supported.
    pub fn parameters(path: &Path) -> Result<Vec<ParameterInfo>> {
        let (_, decoder) = read_config(path)?;
        let dtype = decoder.config().dtype;
        Model(decoder).plain_parameters(dtype)
    }

    /// Creates a byte model from a `config.json`, without a folder on disk.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`open`](Self::open).
    pub(crate) fn from_config(config: String) -> Result<Self> {
        let decoder = parse(Path::new(CONFIG), &config)?;
        let path = PathBuf::new();
        let tokenizer = Tokenizer::bytes(&path, &config, decoder.config().vocab_size)?;
        Ok(Self { path, config, decoder, tokenizer })
    }

    /// Returns the path of the folder. It is empty for the built-in model.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the text of `config.json`.
    pub(crate) fn config_json(&self) -> &str {
        &self.config
    }

    /// Returns the fields of `config.json`.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Json`] if a number is beyond the range of its type.
    pub fn config(&self) -> Result<Value> {
        serde_json::from_str(&self.config).map_err(|cause| Error::Json {
            path: self.path.join(CONFIG),
            expected: "the properties of a model",
            cause,
        })
    }

    /// Returns the model without adapters.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Opens the weights and reads their headers.
    ///
    /// # Errors
    ///
    /// Returns [`FolderError::NoWeights`] or [`FolderError::UnsupportedFormat`] if there are no
    /// safetensors files, and [`FolderError::Weights`] if they are damaged or incomplete.
    pub fn weights(&self) -> Result<StoredWeights> {
        if [ONE_FILE, INDEX].iter().any(|name| self.path.join(name).is_file()) {
            return Ok(StoredWeights::open(&self.path).map_err(|e| FolderError::from(Box::new(e)))?);
        }
        let path = self.path.clone();
        Err(match unsupported_weights(&self.path)? {
            Some(file) => FolderError::UnsupportedFormat { path, file },
            None => FolderError::NoWeights { path },
        }
        .into())
    }

    /// Checks that the weights have no other head than the embedding, if the model ties them.
    ///
    /// # Errors
    ///
    /// [`FolderError::TiedHead`], or [`FolderError::Weights`] if the tensors cannot be read.
    pub(crate) fn check_tied_head(&self, weights: &StoredWeights) -> Result<()> {
        /// Items that are compared at a time, 4 MiB of either tensor.
        const BLOCK: usize = 1 << 20;
        let config = self.decoder.config();
        let names = ["lm_head.weight", "model.embed_tokens.weight"]
            .map(|name| format!("{}{name}", config.name_prefix));
        if !config.tie_word_embeddings || !names.iter().all(|name| weights.contains(name)) {
            return Ok(());
        }
        let shape = [config.vocab_size, config.hidden_size];
        // Beyond what memory addresses, the first block is rejected: no file has this shape.
        let n_items = config.vocab_size.saturating_mul(config.hidden_size);
        for first in (0..n_items).step_by(BLOCK) {
            let range = first..n_items.min(first.saturating_add(BLOCK));
            let [head, embedding] =
                names.each_ref().map(|name| bits(weights, name, shape, range.clone()));
            if head? != embedding? {
                return Err(FolderError::TiedHead { path: self.path.clone() }.into());
            }
        }
        Ok(())
    }

    /// Returns a fingerprint of the weight files in hexadecimal digits. It combines the
    /// fingerprints of the files.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`weights`](Self::weights), and [`Error::Io`] if a file cannot be
    /// read.
    pub(crate) fn weights_fingerprint(&self) -> Result<String> {
        let mut fingerprint = Fingerprint::new();
        for path in self.weights()?.files() {
            let content = Fingerprint::read(path).map_err(|cause| Error::io(path, cause))?;
            fingerprint.write_bytes(content.to_string().as_bytes());
        }
        Ok(fingerprint.to_string())
    }
}

/// Checks the files that a run wrote beside the weights of a model or of adapters. A changed file is
/// an error in the folder of a run, and a warning in a copy, which people may edit.
///
/// # Errors
///
/// [`FolderError::ChangedFile`], or [`FolderError::Weights`] if a file cannot be read.
pub(crate) fn check_files_beside(
    folder: &Path,
    weights: &StoredWeights,
) -> Result<(), FolderError> {
    let changed = weights.changed_files().map_err(Box::new)?;
    let is_in_run = folder.parent().is_some_and(|run| run.join(files::RUN_JSON).exists());
    for name in changed {
        let path = folder.join(name);
        if is_in_run {
            return Err(FolderError::ChangedFile { path });
        }
        tracing::warn!(
            "{} has changed since the run wrote it with its weights, or is missing",
            path.display()
        );
    }
    Ok(())
}

/// Reads the `config.json` of a folder.
fn read_config(folder: &Path) -> Result<(String, Decoder), FolderError> {
    let path = folder.join(CONFIG);
    let config = files::read_text(&path)
        .map_err(|cause| FolderError::Config { path: path.clone(), cause })?;
    let decoder = parse(&path, &config)?;
    Ok((config, decoder))
}

/// Returns the bits of items of a matrix in single precision. Bits are compared, because NaN is not
/// equal to itself.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn bits(
    weights: &StoredWeights,
    name: &str,
    shape: [usize; 2],
    range: Range<usize>,
) -> Result<Vec<u32>> {
    let info = TensorInfo { name: name.into(), shape: shape.into(), dtype: DType::F32 };
    let items = weights.items(&info, range, &Device::Cpu);
    let items = items.map_err(|error| FolderError::from(Box::new(error)))?;
    let items = items.expect("the caller found the matrix").to_vec1::<f32>()?;
    Ok(items.into_iter().map(f32::to_bits).collect())
}

fn parse(file: &Path, config: &str) -> Result<Decoder, FolderError> {
    DecoderConfig::from_json(config)
        .and_then(Decoder::from_config)
        .map_err(|cause| FolderError::Model { path: file.into(), cause })
}

/// Returns true if a folder has weights of any format.
fn has_weights(path: &Path) -> Result<bool> {
    let has_safetensors = [ONE_FILE, INDEX].iter().any(|name| path.join(name).exists());
    Ok(has_safetensors || unsupported_weights(path)?.is_some())
}

/// Returns the name of an unsupported weight file, if there is one.
fn unsupported_weights(path: &Path) -> Result<Option<String>> {
    let names: io::Result<BTreeSet<OsString>> = fs::read_dir(path)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.file_name())).collect());
    let names = names.map_err(|cause| Error::io(path, cause))?;
    let found = names.iter().find(|name| is_unsupported(name));
    Ok(found.map(|name| name.to_string_lossy().into_owned()))
}

fn is_unsupported(name: &OsStr) -> bool {
    let extension = Path::new(name).extension().and_then(OsStr::to_str);
    extension.is_some_and(|extension| UNSUPPORTED_EXTENSIONS.contains(&extension))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    #[test]
    fn other_heads_than_the_tied_embedding_are_rejected() {
        let copy = golden::changed("llama", CONFIG, |config| {
            config["tie_word_embeddings"] = true.into();
        });
        let folder = Folder::open(copy.path()).unwrap();
        let error = folder.check_tied_head(&folder.weights().unwrap()).unwrap_err();
        assert!(matches!(error, Error::Folder(FolderError::TiedHead { .. })), "{error}");
    }
}
