//! Tests of training on meshes of threads.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::needless_pass_by_value, reason = "losses and builders are passed by value")]
#![allow(clippy::cast_possible_truncation, reason = "sizes are small")]
#![allow(clippy::print_stdout, reason = "a child process reports its progress")]

mod check_gradients;
mod checkpoints;
mod fully_shard;
mod lora;
mod losses;
#[path = "../random/mod.rs"]
mod random;
mod random_models;
mod save_pretrained;
mod schedule;
mod steps;
mod support;
mod sync_batch_norm;
mod value_and_grad;
mod variables;
