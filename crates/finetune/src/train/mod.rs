//! Training of a run: from its options to the model that it ends with.

mod built_in;
mod inputs;
pub(crate) mod model;
pub(crate) mod options;
pub(crate) mod prepare;
mod products;
mod shared;
pub(crate) mod trainer;
