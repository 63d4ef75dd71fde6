//! Cuts of sorted sequences into batches.

pub(crate) mod cut;
mod optimal;
