//! Sequences sorted by length, and where sorted ones are cut into batches.

pub(crate) mod cut;
pub(crate) mod histogram;
pub(crate) mod minima;
mod optimal;
