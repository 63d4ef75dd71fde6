//! The laws of data sets and loaders, on random input and with every fault.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod histories;
mod loader;
mod queue;
mod readers;
mod sources;
mod states;
