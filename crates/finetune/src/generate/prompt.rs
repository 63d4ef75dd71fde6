//! What a model begins with, as tokens.

use crate::{
    error::{Error, Result},
    hf::{chat::Message, tokenizer::Tokenizer},
    hint,
};

/// What a model begins with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Prompt<'a> {
    /// A text that it continues.
    Text(&'a str),
    /// A conversation that it answers.
    Messages(&'a [Message]),
}

impl Prompt<'_> {
    /// The tokens of the prompt, for a model of `context` positions.
    ///
    /// # Errors
    ///
    /// If there is none, or if there are more than the model has positions.
    pub(crate) fn ids(self, tokenizer: &Tokenizer, context: usize) -> Result<Vec<u32>> {
        let ids = match self {
            Self::Text(text) => tokenizer.begin(text)?,
            Self::Messages(messages) => tokenizer.prompt(messages)?,
        };
        if ids.is_empty() {
            let none = Error::usage("--prompt has no token that a text could begin with");
            return Err(none.hinted("no token is set before a text here: give a word"));
        }
        if ids.len() > context {
            let len = ids.len();
            let long = format!("--prompt has {len} tokens, and the model has {context} positions");
            return Err(Error::usage(long).hinted(hint::LONG_PROMPT));
        }
        Ok(ids)
    }
}
