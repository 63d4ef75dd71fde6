//! A task that is made up: is a text of good words or of bad ones?
//!
//! Whether a word is good follows from a hash, so nothing but examples can tell. A frozen encoder
//! cannot learn the task: its features are 32 numbers, too few for a classifier to tell 400 words
//! apart by.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are small")]

use candle_core::{Device, Result, Tensor};
use candle_distributed::{
    batch::{self, Collator},
    types::Seed,
};

/// Padding is 0, and every text begins with this token.
const START: u32 = 1;
const FIRST_WORD: u32 = 2;
const WORDS: u32 = 400;
pub(crate) const VOCABULARY: usize = (FIRST_WORD + WORDS) as usize;
pub(crate) const MAX_LENGTH: usize = 33;

/// Ids [batch, length] and mask of the same shape, and labels [batch].
pub(crate) type Batch = (Tensor, Tensor, Tensor);

/// Texts, each good (1) or bad (0) by most of its words.
#[derive(Debug)]
pub(crate) struct Texts {
    tokens: Vec<Vec<u32>>,
    labels: Vec<u32>,
}

impl Texts {
    /// `count` texts, the same for the same seed.
    pub(crate) fn draw(seed: Seed, count: u64) -> Self {
        let labels = (0..count).map(|n| (n % 2) as u32).collect();
        let text = |n: u64| text(seed.derive(n), (n % 2) as u32);
        Self { tokens: (0..count).map(text).collect(), labels }
    }

    pub(crate) fn lengths(&self) -> Vec<u64> {
        self.tokens.iter().map(|text| text.len() as u64).collect()
    }

    /// The tensors of a batch.
    pub(crate) fn collate(&self, batch: &batch::Batch) -> Result<Batch> {
        let tokens = |n: u64| &self.tokens[n as usize][..];
        let padded = Collator::default().pad(batch, tokens, &Device::Cpu)?;
        let labels = padded.per_sequence(|n| self.labels[n as usize])?;
        Ok((padded.ids, padded.rows.mask, labels))
    }
}

/// A text of 8 to 32 words, four out of five of them of the label's kind.
fn text(seed: Seed, label: u32) -> Vec<u32> {
    let mut draws = (0..).map(|n| seed.derive(n).as_u64() >> 32);
    let mut below = |limit: u64| draws.next().map_or(0, |draw| (draw * limit) >> 32) as u32;
    let words = 8 + below(25);
    let mut text = vec![START];
    for _ in 0..words {
        let kind = if below(5) == 0 { 1 - label } else { label };
        text.push(word(kind, &mut below));
    }
    text
}

/// A random word of this kind.
fn word(kind: u32, below: &mut impl FnMut(u64) -> u32) -> u32 {
    loop {
        let word = FIRST_WORD + below(WORDS.into());
        if is_good(word) == (kind == 1) {
            return word;
        }
    }
}

fn is_good(word: u32) -> bool {
    Seed::new(0).derive(word.into()).as_u64().is_multiple_of(2)
}
