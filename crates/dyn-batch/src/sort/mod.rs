//! Sequences sorted by length, and where sorted ones are cut into batches.

pub(crate) mod cut;
pub(crate) mod histogram;
mod level;
pub(crate) mod minima;
mod optimal;
