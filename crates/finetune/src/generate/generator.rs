//! A model that writes.

use std::path::PathBuf;

use candle_core::{Device, IndexOp, Tensor};
use candle_distributed::train::Units;
use serde::Serialize;

use crate::{
    error::Result,
    generation::{prompt::Prompt, sampling::Chooser, weights},
    hf::folder::Folder,
    train::model::Model,
};

/// A model with its weights, and what makes tokens of texts for it.
#[derive(Debug)]
pub(crate) struct Writer {
    model: Model,
    units: Units,
    /// Where its tokenizer comes from.
    folder: Folder,
}

/// How much a model writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Length {
    pub(crate) max_tokens: usize,
    /// Whether it writes on after the end of a text.
    pub(crate) ignore_end: bool,
}

/// What a model has written.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Written {
    /// The tokens of the prompt.
    pub(crate) prompt_ids: Vec<u32>,
    /// Those that the model has written, without the one that ends the text.
    pub(crate) ids: Vec<u32>,
    /// After a text, both as one; after a conversation, the answer.
    pub(crate) text: String,
    pub(crate) stop: Stop,
}

/// Why a model writes no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stop {
    /// It has ended its text.
    End,
    /// It was asked for no more tokens.
    MaxTokens,
    /// It has no more positions.
    Context,
}

impl Length {
    /// As much as is seen at a glance.
    pub(crate) const GLANCE: Self = Self { max_tokens: 64, ignore_end: false };
    /// About as much of a model whose tokens are bytes.
    pub(crate) const GLANCE_OF_BYTES: Self = Self { max_tokens: 320, ignore_end: false };
}

impl Writer {
    /// A model with the weights of these files.
    ///
    /// # Errors
    ///
    /// If the weights, or the adapters, are not those of the model.
    pub(crate) fn new(model: Model, files: &[PathBuf], folder: Folder) -> Result<Self> {
        Ok(Self { units: weights::load(&model, files)?, model, folder })
    }

    /// What the model writes after a prompt.
    ///
    /// # Errors
    ///
    /// If the prompt has no token, or more than the model has positions; if the model computes no
    /// numbers.
    pub(crate) fn write(
        &self,
        prompt: Prompt<'_>,
        length: Length,
        chooser: &mut Chooser,
    ) -> Result<Written> {
        let tokenizer = self.folder.tokenizer();
        let prompt_ids = prompt.ids(tokenizer, self.model.context())?;
        let (ids, stop) = self.continued(&prompt_ids, length, chooser)?;
        let text = match prompt {
            Prompt::Text(_) => tokenizer.decode(&[&prompt_ids[..], &ids].concat(), false)?,
            Prompt::Messages(_) => tokenizer.decode(&ids, false)?,
        };
        Ok(Written { prompt_ids, ids, text, stop })
    }

    fn continued(
        &self,
        prompt: &[u32],
        length: Length,
        chooser: &mut Chooser,
    ) -> Result<(Vec<u32>, Stop)> {
        let mut ids = prompt.to_vec();
        for _ in 0..length.max_tokens {
            if ids.len() > self.model.context() {
                break;
            }
            let next = chooser.choose(&self.logits(&ids)?.i(ids.len() - 1)?)?;
            if self.folder.tokenizer().is_end(next) && !length.ignore_end {
                return Ok((ids.split_off(prompt.len()), Stop::End));
            }
            ids.push(next);
        }
        let ids = ids.split_off(prompt.len());
        let stop = if ids.len() < length.max_tokens { Stop::Context } else { Stop::MaxTokens };
        Ok((ids, stop))
    }

    /// The logits [tokens, vocabulary] after each token of the prompt and of what was written. A last
    /// token beyond the positions has none.
    ///
    /// # Errors
    ///
    /// If the tokens are none of this model.
    pub(crate) fn all_logits(&self, written: &Written) -> Result<Tensor> {
        let mut ids = [&written.prompt_ids[..], &written.ids].concat();
        ids.truncate(self.model.context());
        self.logits(&ids)
    }

    /// The logits [tokens, vocabulary] after each of these.
    fn logits(&self, ids: &[u32]) -> Result<Tensor> {
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        Ok(self.model.logits(&self.units, ids)?.squeeze(0)?)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs};

    use candle_core::safetensors;
    use candle_distributed::types::Seed;

    use super::*;
    use crate::{
        generation::{folders, sampling::Sampling},
        hf::golden,
    };

    fn greedy() -> Chooser {
        Sampling::default().chooser(Seed::new(0)).unwrap()
    }

    fn length(max_tokens: usize) -> Length {
        Length { max_tokens, ignore_end: true }
    }

    #[test]
    fn the_likeliest_tokens_are_those_of_transformers() {
        for model in golden::MODELS {
            let writer = folders::open(&golden::path(model), None).unwrap();
            let texts = golden::json(model, "tokens.json")["generation"].clone();
            let expected = golden::json(model, "expected.json")["generation"].clone();
            let prompt = texts["text"].as_str().unwrap();
            let found = writer.write(Prompt::Text(prompt), length(16), &mut greedy()).unwrap();
            assert_eq!(found.prompt_ids, golden::ids(&expected["prompt"]), "{model}");
            assert_eq!(found.ids, golden::ids(&expected["new"]), "{model}");
            let new_text = golden::folder(model).tokenizer().decode(&found.ids, true).unwrap();
            assert_eq!(new_text, texts["new_text"], "{model}");
            assert!(found.text.starts_with(prompt), "{}", found.text);
            assert_eq!(found.stop, Stop::MaxTokens);
        }
    }

    #[test]
    fn a_text_ends_at_its_end_and_at_the_context() {
        let new = golden::ids(&golden::json("qwen2", "expected.json")["generation"]["new"]);
        let n_before = new.iter().position(|&id| id != new[0]).unwrap();
        let copy = golden::changed("qwen2", "config.json", |config| {
            config["eos_token_id"] = new[n_before].into();
        });
        let writer = folders::open(copy.path(), None).unwrap();
        let prompt = Prompt::Text("When the fog came in");
        let until_end = Length { max_tokens: 16, ignore_end: false };
        let found = writer.write(prompt, until_end, &mut greedy()).unwrap();
        assert_eq!((&found.ids[..], found.stop), (&new[..n_before], Stop::End));

        let copy = golden::changed("qwen2", "config.json", |config| {
            config["max_position_embeddings"] = 12.into();
        });
        let writer = folders::open(copy.path(), None).unwrap();
        let found = writer.write(prompt, length(16), &mut greedy()).unwrap();
        let n_prompt = found.prompt_ids.len();
        // The token after the last position can still be told.
        assert_eq!((n_prompt + found.ids.len(), found.stop), (13, Stop::Context));
        let exactly = length(13 - n_prompt);
        assert_eq!(writer.write(prompt, exactly, &mut greedy()).unwrap().stop, Stop::MaxTokens);
        let long = Prompt::Text("When the fog came in, and no lamp was lit.");
        let fault = writer.write(long, length(1), &mut greedy()).unwrap_err().to_string();
        assert!(fault.ends_with("tokens, and the model has 12 positions"), "{fault}");
        let fault = writer.write(Prompt::Text(""), length(1), &mut greedy()).unwrap_err();
        assert!(fault.to_string().contains("has no token"), "{fault}");
    }

    #[test]
    fn weights_of_another_model_are_refused() {
        let copy = golden::changed("llama", "config.json", |_| {});
        let file = copy.path().join("model.safetensors");
        let tensors = safetensors::load(&file, &Device::Cpu).unwrap();
        let tensors: BTreeMap<String, Tensor> = tensors.into_iter().collect();
        let refusal = |change: &dyn Fn(&mut BTreeMap<String, Tensor>)| {
            let mut tensors = tensors.clone();
            change(&mut tensors);
            safetensors::save(&tensors.into_iter().collect(), &file).unwrap();
            folders::open(copy.path(), None).map(drop).map_err(|fault| fault.to_string())
        };
        let tensor = Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu).unwrap();
        let norm = "model.norm.weight";
        let missing = refusal(&|tensors| drop(tensors.remove(norm))).unwrap_err();
        assert!(missing.ends_with("no weights have model.norm.weight"), "{missing}");
        let bias = "model.layers.0.self_attn.q_proj.bias";
        let more = refusal(&|tensors| drop(tensors.insert(bias.into(), tensor.clone())));
        let more = more.unwrap_err();
        assert!(more.contains(&format!("the model has no {bias}")), "{more}");
        let other = refusal(&|tensors| drop(tensors.insert(norm.into(), tensor.clone())));
        let other = other.unwrap_err();
        assert!(other.contains("has shape [3], and the model's is [32]"), "{other}");
        // Frequencies stand beside the weights of the first Llamas.
        let old = "model.layers.0.self_attn.rotary_emb.inv_freq";
        refusal(&|tensors| drop(tensors.insert(old.into(), tensor.clone()))).unwrap();
        fs::write(&file, "no tensors").unwrap();
        let fault = folders::open(copy.path(), None).unwrap_err().to_string();
        assert!(fault.contains("model.safetensors: "), "{fault}");
    }
}
