//! Random programs on random meshes, and a reference that is independent of the crate.
//!
//! A program is plain data, made from a seed, and interpreted twice. A failing case prints its
//! program and the command that runs it alone. `DIFFERENTIAL_CASES` sets the number of cases of
//! each test, `DIFFERENTIAL_SEED` the first seed. Before a release, run the tests of the crate with 3000
//! cases.

pub(crate) mod array;
pub(crate) mod bits;
pub(crate) mod cases;
#[allow(dead_code, reason = "processes need only a part of it")]
pub(crate) mod faults;
pub(crate) mod generate;
pub(crate) mod gradients;
pub(crate) mod grid;
pub(crate) mod layout;
pub(crate) mod op;
pub(crate) mod pending;
pub(crate) mod program;
pub(crate) mod random;
pub(crate) mod reference;
pub(crate) mod spec;
pub(crate) mod tested;
