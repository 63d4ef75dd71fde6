//! Prompts.

use crate::{
    error::{Result, generate::GenerateError},
    text::{chat::Message, tokenizer::Tokenizer},
};

/// The input of text generation.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Prompt<'a> {
    /// A text to continue.
    Text(&'a str),
    /// A conversation to answer, by the tokenizer's chat template.
    Messages(&'a [Message]),
}

impl Prompt<'_> {
    /// Returns the tokens of the prompt, for a model of `context` positions.
    ///
    /// # Errors
    ///
    /// [`GenerateError::EmptyPrompt`], [`GenerateError::LongPrompt`], or an error of the tokenizer.
    pub fn ids(self, tokenizer: &Tokenizer, context: usize) -> Result<Vec<u32>> {
        let ids = match self {
            Self::Text(text) => tokenizer.begin(text)?,
            Self::Messages(messages) => tokenizer.prompt(messages)?,
        };
        let length = ids.len();
        if length == 0 {
            return Err(GenerateError::EmptyPrompt.into());
        }
        if length > context {
            return Err(GenerateError::LongPrompt { length, context }.into());
        }
        Ok(ids)
    }
}
