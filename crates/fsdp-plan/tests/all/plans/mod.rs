//! Tests of plans: comparison with PyTorch, snapshots, and invalid input.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bad_input;
mod golden;
mod inputs;
mod json_lines;
mod large;
mod schedules;
mod snapshots;
mod sources;
