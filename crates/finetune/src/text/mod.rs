//! Tokenizers, chat templates, and training examples.

mod bounded;
pub(crate) mod byte_tokenizer;
pub(crate) mod chat;
pub(crate) mod examples;
mod lines;
pub(crate) mod source;
pub(crate) mod stories;
pub(crate) mod tokenizer;
