//! Items that only the other crates of this project need.

pub use crate::{
    dtype::{dtype_of, elem_of},
    error::listed::Listed,
    folder::{
        natural_order,
        weights::{AllowedNames, sampled},
        writer::ModelFolder,
    },
    run::footer::{add_footer, check_footer},
};
