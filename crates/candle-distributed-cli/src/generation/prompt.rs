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

/// What makes tokens of texts: a tokenizer, or nothing, where tokens are bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words<'a>(pub(crate) Option<&'a Tokenizer>);

impl Prompt<'_> {
    /// The tokens of the prompt, for a model of `context` positions.
    ///
    /// # Errors
    ///
    /// If there is none, or if there are more than the model has positions.
    pub(crate) fn ids(self, words: Words<'_>, context: usize) -> Result<Vec<u32>> {
        let ids = match self {
            Self::Text(text) => words.begin(text)?,
            Self::Messages(messages) => words.conversation(messages)?,
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

impl Words<'_> {
    /// Whether a model that writes this token has ended its text. Texts of bytes have no end.
    pub(crate) fn is_end(self, id: u32) -> bool {
        self.0.is_some_and(|tokenizer| tokenizer.is_end(id))
    }

    /// The text of some tokens. Bytes that are not UTF-8, such as a part of a character, are replaced.
    ///
    /// # Errors
    ///
    /// If the tokenizer cannot write them, or if one is no byte.
    pub(crate) fn decode(self, ids: &[u32]) -> Result<String> {
        let Some(tokenizer) = self.0 else {
            let byte = |&id| u8::try_from(id).map_err(|_| format!("token {id} is no byte"));
            let bytes: Result<Vec<u8>, String> = ids.iter().map(byte).collect();
            return Ok(String::from_utf8_lossy(&bytes.map_err(Error::usage)?).into_owned());
        };
        tokenizer.decode(ids, false)
    }

    fn begin(self, text: &str) -> Result<Vec<u32>> {
        self.0.map_or_else(
            || Ok(text.bytes().map(u32::from).collect()),
            |tokenizer| tokenizer.begin(text),
        )
    }

    fn conversation(self, messages: &[Message]) -> Result<Vec<u32>> {
        match self.0 {
            Some(tokenizer) => tokenizer.prompt(messages),
            None => Err(Error::usage("a model of bytes has no chat template for messages")
                .hinted(hint::NO_CHAT_TEMPLATE)),
        }
    }
}
