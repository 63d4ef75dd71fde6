//! Models of Hugging Face's folders compute and learn what they do there.

#![cfg(feature = "models")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod config;
mod golden;
mod logits;
mod lora;
mod training;
