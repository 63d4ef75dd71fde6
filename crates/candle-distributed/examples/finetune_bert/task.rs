//! An artificial task: does a text have more good words or more bad words?
//!
//! A hash decides whether a word is good, so a model can learn it from examples only. The
//! classifier alone cannot learn the task on a frozen encoder: 32 features are too few to separate
//! 400 words.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are small")]

use candle_core::{Device, Result, Tensor};
use candle_distributed::{
    batch::{Batch, Collator},
    types::Seed,
};

/// First token of every text; padding is 0.
const START: u32 = 1;
const FIRST_WORD: u32 = 2;
const WORDS: u32 = 400;
pub(crate) const VOCABULARY: usize = (FIRST_WORD + WORDS) as usize;
pub(crate) const MAX_LENGTH: usize = 33;

/// Ids [batch, length], a mask of the same shape, and labels [batch].
pub(crate) type TextBatch = (Tensor, Tensor, Tensor);

/// Texts with labels: 1 for mostly good words, 0 for mostly bad ones.
#[derive(Debug)]
pub(crate) struct LabeledTexts {
    tokens: Vec<Vec<u32>>,
    labels: Vec<u32>,
}

impl LabeledTexts {
    /// Draws `count` texts from a seed.
    pub(crate) fn draw(seed: Seed, count: u64) -> Self {
        let labels: Vec<u32> = (0..count).map(|n| (n % 2) as u32).collect();
        let tokens = (0..count).map(|n| text(seed.derive(n), (n % 2) as u32)).collect();
        Self { tokens, labels }
    }

    pub(crate) fn lengths(&self) -> Vec<u64> {
        self.tokens.iter().map(|text| text.len() as u64).collect()
    }

    /// Pads the texts of a batch to tensors.
    pub(crate) fn collate(&self, batch: &Batch) -> Result<TextBatch> {
        let padded =
            Collator::default().pad(batch, |n| &self.tokens[n as usize][..], &Device::Cpu)?;
        let labels = padded.layout.per_sequence(|n| self.labels[n as usize])?;
        Ok((padded.ids, padded.rows.mask, labels))
    }
}

/// Draws a text of 8 to 32 words; on average, four of five have the label's kind.
fn text(seed: Seed, label: u32) -> Vec<u32> {
    let mut draws = (0..).map(|n| seed.derive(n).as_u64() >> 32);
    let mut draw_index = |limit: u64| draws.next().map_or(0, |draw| (draw * limit) >> 32) as u32;
    let words = 8 + draw_index(25);
    let mut text = vec![START];
    for _ in 0..words {
        let kind = if draw_index(5) == 0 { 1 - label } else { label };
        text.push(draw_word(kind, &mut draw_index));
    }
    text
}

/// Draws a word of this kind.
fn draw_word(kind: u32, draw_index: &mut impl FnMut(u64) -> u32) -> u32 {
    loop {
        let word = FIRST_WORD + draw_index(WORDS.into());
        if is_good(word) == (kind == 1) {
            return word;
        }
    }
}

fn is_good(word: u32) -> bool {
    Seed::new(0).derive(word.into()).as_u64().is_multiple_of(2)
}
