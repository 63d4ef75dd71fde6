//! What a model learns from: sequences of tokens, and which of them it is to predict.

use std::{fs, iter, ops::Range, path::Path};

use candle_distributed::{
    sampler::{DistributedSampler, SamplerConfig},
    types::{Fingerprint, Placement, Seed},
};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    hf::{
        lines::{self, Item, Place},
        tokenizer::{Answered, Tokenizer},
    },
    hint,
    train::corpus,
};

/// The label of a token that is not to be predicted, as in PyTorch.
const IGNORED: i64 = -100;

/// What becomes of texts that are longer than the context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Overlong {
    /// Refuse them
    #[default]
    Error,
    /// Cut them off there
    Truncate,
    /// Leave them out
    Skip,
}

/// Sequences of tokens with their labels.
#[derive(Debug)]
pub(crate) struct Examples {
    examples: Vec<Answered>,
    n_overlong: u64,
}

impl Examples {
    /// The examples of a file, or of all files under a folder in the order of their names, as tokens.
    /// None is longer than `context` tokens.
    ///
    /// A file whose name ends in `.jsonl` holds an example in each line: a string or `{"text"}`, all
    /// of which is to be predicted; `{"prompt", "completion"}`, of which the completion is; or
    /// `{"messages"}`, of which the turns of the assistant are. Any other file holds texts, which
    /// blank lines part. Hidden files and files that are not UTF-8 are skipped.
    ///
    /// # Errors
    ///
    /// With the file and the line, if one is no example or too long, or has nothing to predict.
    pub(crate) fn read(
        path: &Path,
        tokenizer: &Tokenizer,
        context: usize,
        overlong: Overlong,
    ) -> Result<Self> {
        let mut read = Self { examples: Vec::new(), n_overlong: 0 };
        for file in corpus::files(path)? {
            let bytes = fs::read(&file).map_err(|source| Error::read(&file, source))?;
            // What is no text is none to learn from.
            let Ok(text) = String::from_utf8(bytes) else { continue };
            for (place, item) in lines::items(&file, &text)? {
                let example = encode(tokenizer, &item).map_err(|error| error.at(place))?;
                read.add(example, &place, context, overlong)?;
            }
        }
        if read.examples.is_empty() {
            return Err(Error::usage(format!("no text to learn from in {}", path.display())));
        }
        Ok(read)
    }

    /// The number of examples.
    pub(crate) fn len(&self) -> u64 {
        self.examples.len() as u64
    }

    /// The length of every example, in tokens.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        self.examples.iter().map(|example| example.ids.len() as u64).collect()
    }

    /// How many were longer than the context, and are cut off or left out.
    pub(crate) fn n_overlong(&self) -> u64 {
        self.n_overlong
    }

    /// The tokens of example `index`, which must be one of them.
    pub(crate) fn ids(&self, index: u64) -> &[u32] {
        &self.example(index).ids
    }

    /// The labels of its tokens: themselves, and −100 where they are not to be predicted. They are
    /// not shifted.
    pub(crate) fn labels(&self, index: u64) -> Vec<i64> {
        let Answered { ids, answers } = self.example(index);
        let mut labels = vec![IGNORED; ids.len()];
        for answer in answers {
            for (label, &id) in labels[answer.clone()].iter_mut().zip(&ids[answer.clone()]) {
                *label = id.into();
            }
        }
        labels
    }

    /// A hash of the tokens and the labels, in hexadecimal digits.
    pub(crate) fn fingerprint(&self) -> String {
        let mut fingerprint = Fingerprint::new();
        for Answered { ids, answers } in &self.examples {
            fingerprint.word(ids.len() as u64);
            fingerprint.extend(ids.iter().map(|&id| id.into()));
            fingerprint.word(answers.len() as u64);
            fingerprint
                .extend(answers.iter().flat_map(|answer| [answer.start, answer.end]).map(word));
        }
        format!("{:016x}", fingerprint.finish())
    }

    /// The examples in two parts: those to learn from, and a fraction of all, chosen by `seed`, by
    /// which it is seen how much is learnt. Both keep their order.
    ///
    /// # Errors
    ///
    /// If one of the parts would be empty.
    pub(crate) fn split(self, fraction: f64, seed: Seed) -> Result<(Self, Self)> {
        let n_examples = self.examples.len();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a fraction of a number of examples, which is checked below"
        )]
        let n_held_out = (fraction * n_examples as f64).round() as usize;
        if !(fraction > 0. && fraction < 1.) || n_held_out == 0 || n_held_out == n_examples {
            return Err(Error::usage(format!(
                "--validation {fraction} of {n_examples} examples is {n_held_out}, must be 1 to {}",
                n_examples.saturating_sub(1)
            )));
        }
        let is_held_out = held_out(n_examples, n_held_out, seed)?;
        let (mut kept, mut held) = (Vec::new(), Vec::new());
        for (example, is_held) in iter::zip(self.examples, is_held_out) {
            if is_held { held.push(example) } else { kept.push(example) }
        }
        let held = Self { examples: held, n_overlong: 0 };
        Ok((Self { examples: kept, n_overlong: self.n_overlong }, held))
    }

    fn add(
        &mut self,
        mut example: Answered,
        place: &Place<'_>,
        context: usize,
        overlong: Overlong,
    ) -> Result<()> {
        let len = example.ids.len();
        if len > context {
            self.n_overlong += 1;
            match overlong {
                Overlong::Skip => return Ok(()),
                Overlong::Truncate => example = cut(example, context),
                Overlong::Error => {
                    let long = format!("{place} has {len} tokens, and the context is {context}");
                    return Err(Error::usage(long).hinted(hint::OVERLONG));
                }
            }
        }
        // The first token has none before it that could predict it.
        if example.answers.iter().any(|answer| answer.end > answer.start.max(1)) {
            self.examples.push(example);
            return Ok(());
        }
        let fault = if len > context {
            format!("{place} has no answer within the context of {context} tokens")
        } else {
            format!("{place} has no token to predict")
        };
        Err(Error::usage(fault).hinted(hint::NO_TARGET))
    }

    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    fn example(&self, index: u64) -> &Answered {
        let index = usize::try_from(index).expect("examples in memory are counted by a usize");
        &self.examples[index]
    }
}

/// The tokens of an item.
fn encode(tokenizer: &Tokenizer, item: &Item) -> Result<Answered> {
    match item {
        Item::Text(text) => tokenizer.text(text),
        Item::Answer { prompt, completion } => tokenizer.answer(prompt, completion),
        Item::Messages(messages) => tokenizer.conversation(messages),
    }
}

/// The first tokens of an example.
fn cut(mut example: Answered, n_tokens: usize) -> Answered {
    let shorter = |answer: Range<usize>| answer.start.min(n_tokens)..answer.end.min(n_tokens);
    example.ids.truncate(n_tokens);
    example.answers = example.answers.into_iter().map(shorter).collect();
    example
}

/// Which examples a model does not learn from: the first ones of a random order.
fn held_out(n_examples: usize, n_held_out: usize, seed: Seed) -> Result<Vec<bool>> {
    let config = SamplerConfig::default().with_seed(seed);
    let order = DistributedSampler::new(n_examples as u64, Placement::SINGLE, config)?;
    let mut is_held_out = vec![false; n_examples];
    for index in order.iter().take(n_held_out) {
        is_held_out[usize::try_from(index).map_err(|_| Error::usage("too many examples"))?] = true;
    }
    Ok(is_held_out)
}

fn word(number: usize) -> u64 {
    number as u64
}
