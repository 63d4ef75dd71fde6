//! Checkpoints of models in training.

mod files;
mod run;
