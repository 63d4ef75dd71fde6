//! Texts as tokens: tokenizers, chat templates, and the examples that a model learns from.

pub(crate) mod byte_tokenizer;
pub(crate) mod chat;
pub(crate) mod examples;
mod lines;
pub(crate) mod stories;
pub(crate) mod tokenizer;
