//! The files of a run: their damage, their lock, and ranges of their items.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "a child tells its parent how far it is")]

mod damage;
mod files;
mod items;
mod lock;
mod run;
