//! Tests of checkpoints.

mod files;
mod run;
