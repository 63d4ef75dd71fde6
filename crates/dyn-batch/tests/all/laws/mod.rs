//! Laws for every input: exhaustive on small grids, random beyond.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a failed unwrap is a broken law")]

mod grids;
mod sets;
mod stream;
mod support;
mod worlds;
