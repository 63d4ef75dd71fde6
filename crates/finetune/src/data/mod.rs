//! Batches of examples, and a model as it is trained on them.

pub(crate) mod dataset;
pub(crate) mod model;
pub(crate) mod schedule;
