//! The subcommands, one file each.

pub(crate) mod batch;
pub(crate) mod completions;
pub(crate) mod generate;
#[cfg(unix)]
pub(crate) mod launch;
pub(crate) mod man;
pub(crate) mod mesh;
pub(crate) mod plan;
pub(crate) mod report;
pub(crate) mod sample;
pub(crate) mod train;
