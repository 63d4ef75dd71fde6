//! A model that writes.

use std::path::Path;

use candle_core::{Device, IndexOp, Tensor};
use candle_distributed::{
    models::{Llama, Tokens},
    train::{Lora, Units},
};
use serde::Serialize;

use crate::{
    error::{Error, Result},
    generation::{sampling::Chooser, weights},
    hf::{chat::Message, folder::Folder, tokenizer::Tokenizer},
    hint,
};

/// A model with its weights, and what makes tokens of texts for it.
#[derive(Debug)]
pub(crate) struct Writer {
    folder: Folder,
    llama: Llama,
    units: Units,
}

/// What a model begins with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Prompt<'a> {
    /// A text that it continues.
    Text(&'a str),
    /// A conversation that it answers.
    Messages(&'a [Message]),
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

impl Writer {
    /// The model of a folder, with adapters if there is a folder of them.
    ///
    /// # Errors
    ///
    /// If the weights, or the adapters, are not those of the model.
    pub(crate) fn open(folder: Folder, adapter: Option<&Path>) -> Result<Self> {
        let mut llama = folder.llama().clone();
        if let Some(path) = adapter {
            llama = llama.with_lora(Lora::open(path)?);
        }
        let is_tied = llama.config().tie_word_embeddings;
        let is_passed_over = |name: &str| {
            name.ends_with("rotary_emb.inv_freq") || is_tied && name == "lm_head.weight"
        };
        let (files, rules) = (folder.weights()?, llama.units());
        let units =
            weights::load(&files, llama.lora(), rules, is_passed_over, |vb| llama.declare(vb))?;
        Ok(Self { folder, llama, units })
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
        let prompt_ids = match prompt {
            Prompt::Text(text) => self.tokenizer().begin(text)?,
            Prompt::Messages(messages) => self.tokenizer().prompt(messages)?,
        };
        self.check_prompt(&prompt_ids)?;
        let (ids, stop) = self.continued(&prompt_ids, length, chooser)?;
        let text = match prompt {
            Prompt::Text(_) => self.tokenizer().decode(&[&prompt_ids[..], &ids].concat(), false)?,
            Prompt::Messages(_) => self.tokenizer().decode(&ids, false)?,
        };
        Ok(Written { prompt_ids, ids, text, stop })
    }

    fn tokenizer(&self) -> &Tokenizer {
        self.folder.tokenizer()
    }

    fn context(&self) -> usize {
        self.llama.config().max_position_embeddings
    }

    fn check_prompt(&self, ids: &[u32]) -> Result<()> {
        if ids.is_empty() {
            let none = Error::usage("--prompt has no token that a text could begin with");
            return Err(none.hinted("this tokenizer sets no token before a text: give a word"));
        }
        if ids.len() > self.context() {
            let (len, context) = (ids.len(), self.context());
            let long = format!("--prompt has {len} tokens, and the model has {context} positions");
            return Err(Error::usage(long).hinted(hint::LONG_PROMPT));
        }
        Ok(())
    }

    fn continued(
        &self,
        prompt: &[u32],
        length: Length,
        chooser: &mut Chooser,
    ) -> Result<(Vec<u32>, Stop)> {
        let mut ids = prompt.to_vec();
        for _ in 0..length.max_tokens {
            if ids.len() > self.context() {
                break;
            }
            let next = chooser.choose(&self.logits(&ids)?)?;
            if self.tokenizer().is_end(next) && !length.ignore_end {
                return Ok((ids.split_off(prompt.len()), Stop::End));
            }
            ids.push(next);
        }
        let ids = ids.split_off(prompt.len());
        let stop = if ids.len() < length.max_tokens { Stop::Context } else { Stop::MaxTokens };
        Ok((ids, stop))
    }

    /// The logits [vocabulary] of the token after these.
    fn logits(&self, ids: &[u32]) -> Result<Tensor> {
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        let logits = self.llama.logits(&self.units, &Tokens::rows(ids))?;
        Ok(logits.i((0, logits.dim(1)? - 1))?)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs};

    use candle_core::safetensors;
    use candle_distributed::types::Seed;

    use super::*;
    use crate::{generation::sampling::Sampling, hf::golden};

    fn greedy() -> Chooser {
        Sampling::default().chooser(Seed::new(0)).unwrap()
    }

    fn length(max_tokens: usize) -> Length {
        Length { max_tokens, ignore_end: true }
    }

    #[test]
    fn the_likeliest_tokens_are_those_of_transformers() {
        for model in golden::MODELS {
            let writer = Writer::open(golden::folder(model), None).unwrap();
            let texts = golden::json(model, "tokens.json")["generation"].clone();
            let expected = golden::json(model, "expected.json")["generation"].clone();
            let prompt = texts["text"].as_str().unwrap();
            let found = writer.write(Prompt::Text(prompt), length(16), &mut greedy()).unwrap();
            assert_eq!(found.prompt_ids, golden::ids(&expected["prompt"]), "{model}");
            assert_eq!(found.ids, golden::ids(&expected["new"]), "{model}");
            let new_text = writer.tokenizer().decode(&found.ids, true).unwrap();
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
        let writer = Writer::open(Folder::open(copy.path()).unwrap(), None).unwrap();
        let prompt = Prompt::Text("When the fog came in");
        let until_end = Length { max_tokens: 16, ignore_end: false };
        let found = writer.write(prompt, until_end, &mut greedy()).unwrap();
        assert_eq!((&found.ids[..], found.stop), (&new[..n_before], Stop::End));

        let copy = golden::changed("qwen2", "config.json", |config| {
            config["max_position_embeddings"] = 12.into();
        });
        let writer = Writer::open(Folder::open(copy.path()).unwrap(), None).unwrap();
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
            let folder = Folder::open(copy.path()).unwrap();
            Writer::open(folder, None).map(drop).map_err(|fault| fault.to_string())
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
        let folder = Folder::open(copy.path()).unwrap();
        let fault = Writer::open(folder, None).unwrap_err().to_string();
        assert!(fault.contains("model.safetensors: "), "{fault}");
    }
}
