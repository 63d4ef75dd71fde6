//! What the crates of this project need of each other, and nobody else.

pub use crate::{
    dtype::{dtype_of, elem_of},
    error::listed,
    folder::{
        natural_order,
        weights::{AllowedNames, sampled},
        writer::ModelFolder,
    },
};
