//! The command line from outside: one program for all its tests.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod pins;
mod support;

mod cli;
mod damage;
mod data;
mod finetune;
mod generate;
#[cfg(unix)]
mod guide;
mod help;
mod hints;
mod hunts;
#[cfg(unix)]
mod launch;
mod mesh;
mod pinned;
mod plan_svg;
mod precision;
mod recipe;
mod report;
mod runs;
mod schemas;
mod sharded;
mod stories;
#[cfg(unix)]
mod streams;
