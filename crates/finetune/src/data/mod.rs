//! Batches of examples, and the trained model.

pub(crate) mod dataset;
pub(crate) mod model;
pub(crate) mod schedule;
