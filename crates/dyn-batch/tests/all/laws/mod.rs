//! Laws that hold for every input: exhaustively on small grids, by random cases beyond.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a failed unwrap is a broken law")]

mod sets;
mod stream;
mod support;
