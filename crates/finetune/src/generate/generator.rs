//! A model that generates text.

use std::path::Path;

use candle_core::{Device, IndexOp, Tensor};
use dist_checkpoint::StoredWeights;
use dist_train::{Lora, Units};
use serde::Serialize;

use crate::{
    error::{Result, folder::FolderError},
    files::CONFIG,
    folder::{ADAPTER_WEIGHTS, Folder, check_files_beside},
    generate::{choose::Chooser, options::Generation, prompt::Prompt, weights},
    models::{
        Decoder, Tokens,
        cached::{CachedDecoder, TextCache},
    },
};

/// The file of PEFT that describes adapters in their folder.
const ADAPTER_CONFIG: &str = "adapter_config.json";

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
    decoder: Decoder,
    /// The weights for [`logits`](Self::logits).
    units: Units,
    /// The same tensors, for [`generate`](Self::generate).
    cached: CachedDecoder,
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
        let decoder = folder.decoder().clone();
        let mut with_lora = decoder.clone();
        if let Some(path) = adapter {
            let lora = Lora::open(path).map_err(|cause| FolderError::Adapters {
                path: path.into(),
                cause: Box::new(cause),
            })?;
            // Opened only for the list of files that were saved with the weights.
            let adapter_weights = StoredWeights::open(path.join(ADAPTER_WEIGHTS))
                .map_err(|cause| FolderError::from(Box::new(cause)))?;
            check_files_beside(path, &adapter_weights)?;
            with_lora = with_lora
                .with_lora(lora)
                .map_err(|cause| FolderError::AdapterMismatch { cause: cause.into() })?;
        }
        let vb = weights::load(&folder, &with_lora)?;
        let cached = CachedDecoder::new(decoder.config(), &vb)?;
        let units = Units::constructor(decoder.units(), |vb| decoder.declare(&vb))(vb)?;
        Ok(Self { folder, decoder, units, cached })
    }

    /// Continues a text, or answers a conversation.
    ///
    /// The prompt takes one pass through the model, and each new token another pass, which reads
    /// every weight once. The keys and values of all tokens are cached.
    ///
    /// # Errors
    ///
    /// [`Error::Generate`](crate::Error::Generate) for invalid options or a prompt that is empty or
    /// too long, [`Error::Tensor`](crate::Error::Tensor) if a logit is not a number.
    pub fn generate(&self, prompt: Prompt<'_>, options: &Generation) -> Result<Generated> {
        Ok(self.generate_all(&[prompt], options)?.swap_remove(0))
    }

    /// Generates a text for each prompt, like [`generate`](Self::generate): a pass reads the weights
    /// once for all texts. Prompts may have different lengths, and are not padded.
    ///
    /// # Determinism
    ///
    /// On one processor model, each text has the bits of [`generate`](Self::generate) with its prompt
    /// alone, for any number of threads. Random tokens of every text begin with the same seed.
    ///
    /// # Errors
    ///
    /// The errors of [`generate`](Self::generate), if a prompt or a logit of any text is invalid.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use std::path::Path;
    /// # use finetune::{Generation, Generator, Prompt};
    /// let generator = Generator::open(Path::new("llama"), None)?;
    /// let prompts = ["When the fog came in", "3 and 1 is"].map(Prompt::Text);
    /// for generated in generator.generate_all(&prompts, &Generation::default())? {
    ///     println!("{}", generated.text);
    /// }
    /// # Ok::<(), finetune::Error>(())
    /// ```
    pub fn generate_all(
        &self,
        prompts: &[Prompt<'_>],
        options: &Generation,
    ) -> Result<Vec<Generated>> {
        options.check()?;
        let mut drafts = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let prompt_ids = prompt.ids(self.folder.tokenizer(), self.context())?;
            drafts.push(Draft::new(prompt_ids, options));
        }
        self.complete(&mut drafts, options)?;
        let texts = prompts.iter().zip(drafts);
        texts.map(|(prompt, draft)| self.decode(*prompt, draft)).collect()
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

    /// Writes all drafts to their ends.
    fn complete(&self, drafts: &mut [Draft], options: &Generation) -> Result<()> {
        for draft in drafts.iter_mut().filter(|draft| draft.is_open) {
            let logits = self.cached.start(&draft.ids, &mut draft.cache)?;
            self.extend(draft, &logits.i(0)?, options)?;
        }
        loop {
            let mut open: Vec<_> = drafts.iter_mut().filter(|draft| draft.is_open).collect();
            if open.is_empty() {
                return Ok(());
            }
            let last_ids: Vec<u32> =
                open.iter().filter_map(|draft| draft.ids.last()).copied().collect();
            let mut caches: Vec<_> = open.iter_mut().map(|draft| &mut draft.cache).collect();
            let logits = self.cached.advance(&last_ids, &mut caches)?;
            for (row, draft) in open.into_iter().enumerate() {
                self.extend(draft, &logits.i(row)?, options)?;
            }
        }
    }

    /// Appends the token that `logits` [vocabulary] choose, or ends the text.
    fn extend(&self, draft: &mut Draft, logits: &Tensor, options: &Generation) -> Result<()> {
        let next = draft.chooser.choose(logits)?;
        if self.folder.tokenizer().is_end(next) && !options.ignore_end {
            draft.end(Stop::End);
            return Ok(());
        }
        draft.ids.push(next);
        if draft.ids.len() - draft.n_prompt >= options.max_tokens {
            draft.end(Stop::MaxTokens);
        } else if draft.ids.len() > self.context() {
            // The logits of the last position have chosen one more token.
            draft.end(Stop::Context);
        }
        Ok(())
    }

    /// Decodes the tokens of a complete text.
    fn decode(&self, prompt: Prompt<'_>, draft: Draft) -> Result<Generated> {
        let Draft { ids: mut prompt_ids, n_prompt, stop, .. } = draft;
        let tokenizer = self.folder.tokenizer();
        let ids = prompt_ids.split_off(n_prompt);
        let text = match prompt {
            Prompt::Text(_) => tokenizer.decode(&[&prompt_ids[..], &ids].concat(), false)?,
            Prompt::Messages(_) => tokenizer.decode(&ids, false)?,
        };
        Ok(Generated { prompt_ids, ids, text, stop })
    }

    /// Returns the logits [tokens, vocabulary] after each token.
    fn logits_after(&self, ids: &[u32]) -> Result<Tensor> {
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        let decoder = self.decoder.clone().with_context(ids.dim(1)?);
        Ok(decoder.logits(&self.units, &Tokens::rows(ids))?.squeeze(0)?)
    }

    fn context(&self) -> usize {
        self.decoder.config().max_position_embeddings
    }
}

/// A text in progress.
struct Draft {
    /// Tokens of the prompt, then new tokens.
    ids: Vec<u32>,
    n_prompt: usize,
    chooser: Chooser,
    cache: TextCache,
    is_open: bool,
    /// The reason of the end, once the text is not open.
    stop: Stop,
}

impl Draft {
    fn new(prompt_ids: Vec<u32>, options: &Generation) -> Self {
        Self {
            n_prompt: prompt_ids.len(),
            ids: prompt_ids,
            chooser: Chooser::new(options),
            cache: TextCache::default(),
            is_open: options.max_tokens > 0,
            stop: Stop::MaxTokens,
        }
    }

    /// Ends the text, and frees its cache.
    fn end(&mut self, stop: Stop) {
        self.is_open = false;
        self.stop = stop;
        self.cache = TextCache::default();
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
        for model in golden::MODELS.into_iter().chain(golden::FAMILIES) {
            let generator = open(&golden::path(model)).unwrap();
            let expected = golden::json(model, "expected.json")["generation"].clone();
            // The texts of the Llama family stand in a file of their own.
            let has_texts = golden::path(model).join("tokens.json").exists();
            let texts = if has_texts {
                golden::json(model, "tokens.json")["generation"].clone()
            } else {
                expected.clone()
            };
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

    /// Returns the texts of all prompts, and checks that each is the text of its prompt alone.
    fn generate_in_company(generator: &Generator, options: &Generation) -> Vec<Generated> {
        let prompts =
            ["When the fog came in", "3", "Two ships and a lamp, and the fog"].map(Prompt::Text);
        let texts = generator.generate_all(&prompts, options).unwrap();
        for (prompt, text) in prompts.into_iter().zip(&texts) {
            assert_eq!(generator.generate(prompt, options).unwrap(), *text);
        }
        texts
    }

    #[test]
    fn texts_match_plain_forward() {
        // The first tokens of a text with LongRoPE are chosen with the frequencies of short texts.
        let families = golden::FAMILIES.into_iter().filter(|model| *model != "phi3_longrope");
        for model in golden::MODELS.into_iter().chain(families) {
            let generator = open(&golden::path(model)).unwrap();
            for text in generate_in_company(&generator, &length(40)) {
                let logits = generator.logits(&text).unwrap();
                let likeliest: Vec<u32> = logits.argmax(1).unwrap().to_vec1().unwrap();
                assert_eq!(likeliest[text.prompt_ids.len() - 1..][..40], text.ids, "{model}");
            }
            let texts = generate_in_company(&generator, &length(20).with_temperature(1.5));
            assert!(texts.iter().all(|text| text.ids.len() == 20));
            generate_in_company(&generator, &Generation::default().with_max_tokens(200));
            assert!(
                generate_in_company(&generator, &length(0)).iter().all(|text| text.ids.is_empty())
            );
            assert!(generator.generate_all(&[], &length(1)).unwrap().is_empty());
        }
    }

    #[test]
    fn cached_logits_match_plain_logits() {
        for model in golden::MODELS.into_iter().chain(golden::FAMILIES) {
            let generator = open(&golden::path(model)).unwrap();
            let rows = [1_u32, 7, 40].map(|n| (0..n + 30).map(|i| (i * 37 + n) % 300).collect());
            let rows: [Vec<u32>; 3] = rows;
            let mut caches = [(); 3].map(|()| TextCache::default());
            for ((row, n), cache) in rows.iter().zip([1, 7, 40]).zip(&mut caches) {
                let logits = generator.cached.start(&row[..n], cache).unwrap();
                check_logits(&generator, &row[..n], &logits.i(0).unwrap());
            }
            for step in 0..30 {
                let next = [1, 7, 40].map(|n| n + step);
                let ids: Vec<u32> = rows.iter().zip(next).map(|(row, n)| row[n]).collect();
                let mut caches: Vec<_> = caches.iter_mut().collect();
                let logits = generator.cached.advance(&ids, &mut caches).unwrap();
                for (index, n) in next.into_iter().enumerate() {
                    check_logits(&generator, &rows[index][..=n], &logits.i(index).unwrap());
                }
            }
        }
    }

    /// Checks logits against the last row of the plain forward pass.
    fn check_logits(generator: &Generator, ids: &[u32], found: &Tensor) {
        let plain = generator.logits_after(ids).unwrap().i(ids.len() - 1).unwrap();
        let difference = (plain - found).unwrap().abs().unwrap().max_all().unwrap();
        assert!(difference.to_scalar::<f32>().unwrap() < 2e-5, "{difference} at {}", ids.len());
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
