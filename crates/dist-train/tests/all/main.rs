//! What training on meshes of threads must do, case by case.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::needless_pass_by_value, reason = "losses and builders are given by value")]
#![allow(clippy::cast_possible_truncation, reason = "sizes are small")]
#![allow(clippy::print_stdout, reason = "a child tells its parent how far it is")]

mod check_gradients;
mod checkpoints;
mod feed;
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
