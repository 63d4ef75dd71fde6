//! Models and texts of Hugging Face: a folder with a model and its tokenizer, the examples that it
//! learns from, and what it writes.

pub(crate) mod byte_tokenizer;
pub(crate) mod chat;
pub(crate) mod examples;
pub(crate) mod folder;
pub(crate) mod lines;
pub(crate) mod tokenizer;
