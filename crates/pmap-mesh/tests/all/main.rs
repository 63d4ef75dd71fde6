//! Meshes over threads: calls, collectives, their failures, and random programs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod collectives;
mod coverage;
mod deadlines;
#[path = "../differential/mod.rs"]
mod differential;
mod faults;
mod lists;
mod pending;
mod pmap;
mod random_cases;
mod traffic;
