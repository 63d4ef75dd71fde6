//! The subcommands, one file each.

pub(crate) mod batch;
pub(crate) mod plan;
pub(crate) mod sample;
pub(crate) mod train;
