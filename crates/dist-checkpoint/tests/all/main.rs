//! The files of a run: damage, the lock of the folder, and ranges of items.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "a child reports its progress to its parent")]

mod damage;
mod files;
mod items;
mod lock;
mod run;
