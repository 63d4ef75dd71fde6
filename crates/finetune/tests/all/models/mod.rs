//! Models of Hugging Face's folders compute and learn what they do there.

mod config;
mod golden;
mod logits;
mod lora;
mod training;
