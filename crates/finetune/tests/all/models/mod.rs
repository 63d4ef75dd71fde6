//! Models of Hugging Face folders give the same results as in transformers.

mod config;
mod golden;
mod logits;
mod lora;
mod text_part;
mod training;
