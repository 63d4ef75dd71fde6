//! Checkpoints: the files of a run, their damage, and who may write them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "a child tells its parent how far it is")]

mod damage;
mod files;
mod lock;
mod run;
mod version_1;
