//! A model that generates text.

use std::path::Path;

use candle_core::{Device, IndexOp, Tensor};
use dist_checkpoint::StoredWeights;
use dist_train::{Lora, Units};
use serde::Serialize;

use crate::{
    error::{Result, folder::FolderError},
    files::CONFIG,
    folder::{Folder, check_files_beside},
    generate::{choose::Chooser, options::Generation, prompt::Prompt, weights},
    models::{Llama, Tokens},
};

/// The file of PEFT that describes adapters in their folder.
const ADAPTER_CONFIG: &str = "adapter_config.json";
/// The file of their weights.
const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// A model with its weights and its tokenizer, to generate text on the CPU in single precision.
///
/// # Examples
///
/// ```no_run
/// use std::path::Path;
///
/// use finetune::{Generation, Generator, Prompt};
///
/// let generator = Generator::open(Path::new("llama"), None)?;
/// let options = Generation::default().with_max_tokens(16);
/// println!("{}", generator.generate(Prompt::Text("When the fog came in"), &options)?.text);
/// # Ok::<(), finetune::Error>(())
/// ```
#[derive(Debug)]
pub struct Generator {
    folder: Folder,
    llama: Llama,
    units: Units,
}

/// A generated text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Generated {
    /// Tokens of the prompt.
    pub prompt_ids: Vec<u32>,
    /// New tokens, without the end token.
    pub ids: Vec<u32>,
    /// The prompt and its continuation; after a conversation, the answer.
    pub text: String,
    /// The reason of the end.
    pub stop: Stop,
}

/// The reason why a text ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Stop {
    /// The model generated an end token.
    End,
    /// The text has the requested number of tokens.
    MaxTokens,
    /// The model has no more positions.
    Context,
}

impl Generator {
    /// Loads the model of a folder, with the adapters of another folder if there is one.
    ///
    /// # Errors
    ///
    /// [`Error::Folder`](crate::Error::Folder) if a folder is incomplete, or if the adapters belong to
    /// another model.
    pub fn open(path: &Path, adapter: Option<&Path>) -> Result<Self> {
        if path.join(ADAPTER_CONFIG).exists() && !path.join(CONFIG).exists() {
            return Err(FolderError::AdaptersAlone { path: path.into() }.into());
        }
        Self::from_folder(Folder::open(path)?, adapter)
    }

    /// Loads the model of an open folder.
    ///
    /// # Errors
    ///
    /// The errors of [`open`](Self::open).
    pub(crate) fn from_folder(folder: Folder, adapter: Option<&Path>) -> Result<Self> {
        let mut llama = folder.llama().clone();
        if let Some(path) = adapter {
            let lora = Lora::open(path).map_err(|cause| FolderError::Adapters {
                path: path.into(),
                cause: Box::new(cause),
            })?;
            // Opened only for the list of files that were saved with the weights.
            let adapter_weights = StoredWeights::open(path.join(ADAPTER_WEIGHTS))
                .map_err(|cause| FolderError::from(Box::new(cause)))?;
            check_files_beside(path, &adapter_weights)?;
            llama = llama.with_lora(lora);
        }
        Ok(Self { units: weights::load(&folder, &llama)?, llama, folder })
    }

    /// Continues a text, or answers a conversation.
    ///
    /// # Errors
    ///
    /// [`Error::Generate`](crate::Error::Generate) for invalid options or a prompt that is empty or
    /// too long, [`Error::Tensor`](crate::Error::Tensor) if a logit is not a number.
    pub fn generate(&self, prompt: Prompt<'_>, options: &Generation) -> Result<Generated> {
        options.check()?;
        let tokenizer = self.folder.tokenizer();
        let prompt_ids = prompt.ids(tokenizer, self.context())?;
        let (ids, stop) = self.generate_ids(&prompt_ids, options)?;
        let text = match prompt {
            Prompt::Text(_) => tokenizer.decode(&[&prompt_ids[..], &ids].concat(), false)?,
            Prompt::Messages(_) => tokenizer.decode(&ids, false)?,
        };
        Ok(Generated { prompt_ids, ids, text, stop })
    }

    /// Returns the logits [tokens, vocabulary] after each token of the prompt and its continuation. A
    /// last token beyond the positions of the model is left out.
    ///
    /// # Errors
    ///
    /// [`Error::Tensor`](crate::Error::Tensor) if the tokens are not in the vocabulary.
    pub fn logits(&self, generated: &Generated) -> Result<Tensor> {
        let mut ids = [&generated.prompt_ids[..], &generated.ids].concat();
        ids.truncate(self.context());
        self.logits_after(&ids)
    }

    /// Returns the tokens that follow `prompt`, and the reason of their end.
    fn generate_ids(&self, prompt: &[u32], options: &Generation) -> Result<(Vec<u32>, Stop)> {
        let mut chooser = Chooser::new(options);
        let mut ids = prompt.to_vec();
        for _ in 0..options.max_tokens {
            // The logits of the last position still choose one more token.
            if ids.len() > self.context() {
                return Ok((ids.split_off(prompt.len()), Stop::Context));
            }
            let next = chooser.choose(&self.logits_after(&ids)?.i(ids.len() - 1)?)?;
            if self.folder.tokenizer().is_end(next) && !options.ignore_end {
                return Ok((ids.split_off(prompt.len()), Stop::End));
            }
            ids.push(next);
        }
        Ok((ids.split_off(prompt.len()), Stop::MaxTokens))
    }

    /// Returns the logits [tokens, vocabulary] after each token.
    fn logits_after(&self, ids: &[u32]) -> Result<Tensor> {
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        Ok(self.llama.logits(&self.units, &Tokens::rows(ids))?.squeeze(0)?)
    }

    fn context(&self) -> usize {
        self.llama.config().max_position_embeddings
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs};

    use candle_core::safetensors;

    use super::*;
    use crate::golden;

    fn length(max_tokens: usize) -> Generation {
        Generation { max_tokens, ignore_end: true, ..Generation::default() }
    }

    fn open(path: &Path) -> Result<Generator> {
        Generator::open(path, None)
    }

    #[test]
    fn greedy_tokens_match_transformers() {
        for model in golden::MODELS {
            let generator = open(&golden::path(model)).unwrap();
            let texts = golden::json(model, "tokens.json")["generation"].clone();
            let expected = golden::json(model, "expected.json")["generation"].clone();
            let prompt = texts["text"].as_str().unwrap();
            let found = generator.generate(Prompt::Text(prompt), &length(16)).unwrap();
            assert_eq!(found.prompt_ids, golden::ids(&expected["prompt"]), "{model}");
            assert_eq!(found.ids, golden::ids(&expected["new"]), "{model}");
            let new_text = golden::folder(model).tokenizer().decode(&found.ids, true).unwrap();
            assert_eq!(new_text, texts["new_text"], "{model}");
            assert!(found.text.starts_with(prompt), "{}", found.text);
            assert_eq!(found.stop, Stop::MaxTokens);
        }
    }

    #[test]
    fn generation_stops_at_end_or_context() {
        let new = golden::ids(&golden::json("qwen2", "expected.json")["generation"]["new"]);
        let n_before = new.iter().position(|&id| id != new[0]).unwrap();
        let copy = golden::changed("qwen2", "config.json", |config| {
            config["eos_token_id"] = new[n_before].into();
        });
        let generator = open(copy.path()).unwrap();
        let prompt = Prompt::Text("When the fog came in");
        let until_end = Generation::default().with_max_tokens(16);
        let found = generator.generate(prompt, &until_end).unwrap();
        assert_eq!((&found.ids[..], found.stop), (&new[..n_before], Stop::End));

        let copy = golden::changed("qwen2", "config.json", |config| {
            config["max_position_embeddings"] = 12.into();
        });
        let generator = open(copy.path()).unwrap();
        let found = generator.generate(prompt, &length(16)).unwrap();
        let n_prompt = found.prompt_ids.len();
        // The last position still predicts one more token.
        assert_eq!((n_prompt + found.ids.len(), found.stop), (13, Stop::Context));
        let exactly = length(13 - n_prompt);
        assert_eq!(generator.generate(prompt, &exactly).unwrap().stop, Stop::MaxTokens);
        let long = Prompt::Text("When the fog came in, and no lamp was lit.");
        let fault = generator.generate(long, &length(1)).unwrap_err().to_string();
        assert!(fault.ends_with("tokens, but the model has 12 positions"), "{fault}");
        let fault = generator.generate(Prompt::Text(""), &length(1)).unwrap_err();
        assert!(fault.to_string().contains("has no token"), "{fault}");
    }

    #[test]
    fn foreign_weights_are_rejected() {
        let copy = golden::changed("llama", "config.json", |_| {});
        let file = copy.path().join("model.safetensors");
        let tensors = safetensors::load(&file, &Device::Cpu).unwrap();
        let tensors: BTreeMap<String, Tensor> = tensors.into_iter().collect();
        let rejection = |change: &dyn Fn(&mut BTreeMap<String, Tensor>)| {
            let mut tensors = tensors.clone();
            change(&mut tensors);
            safetensors::save(&tensors.into_iter().collect(), &file).unwrap();
            open(copy.path()).map(drop).map_err(|fault| fault.to_string())
        };
        let tensor = Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu).unwrap();
        let norm = "model.norm.weight";
        let missing = rejection(&|tensors| drop(tensors.remove(norm))).unwrap_err();
        assert!(
            missing.contains("1 of 21 parameters are missing (model.norm.weight)"),
            "{missing}"
        );
        let bias = "model.layers.0.self_attn.q_proj.bias";
        let more = rejection(&|tensors| drop(tensors.insert(bias.into(), tensor.clone())));
        let more = more.unwrap_err();
        assert!(more.contains(&format!("1 of 22 tensors are not the model's ({bias})")), "{more}");
        let other = rejection(&|tensors| drop(tensors.insert(norm.into(), tensor.clone())));
        let other = other.unwrap_err();
        assert!(other.contains("has shape [3], expected [32]"), "{other}");
        // Folders of the first Llamas contain frequencies too.
        let old = "model.layers.0.self_attn.rotary_emb.inv_freq";
        rejection(&|tensors| drop(tensors.insert(old.into(), tensor.clone()))).unwrap();
        fs::write(&file, "no tensors").unwrap();
        let fault = open(copy.path()).unwrap_err().to_string();
        assert!(fault.contains("model.safetensors: "), "{fault}");
    }
}
