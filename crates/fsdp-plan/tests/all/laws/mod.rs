//! Laws for every input: exhaustive on small grids, random beyond.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub(crate) mod plan;
mod reshard;
mod schedule;
