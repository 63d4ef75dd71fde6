//! Laws that hold for every input: exhaustively on small grids, by random cases beyond.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub(crate) mod plan;
mod reshard;
mod schedule;
