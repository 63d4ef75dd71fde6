//! Sequences sorted by length, and where sorted ones are cut into batches.

pub(crate) mod cut;
mod optimal;
