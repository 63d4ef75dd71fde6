//! Fixtures shared by the tests and the benches.

#[cfg(doctest)]
mod guide;
#[path = "../../crates/dyn-batch/tests/all/lengths.rs"]
pub mod lengths;
pub mod padding;

/// The examples of the workspace's README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
