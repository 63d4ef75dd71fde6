//! A sharded model: the bits of data parallel and plain candle, what it refuses, how it fails.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::needless_pass_by_value, reason = "losses and builders are given by value")]

mod accumulation;
mod bits;
mod faults;
mod in_backward;
mod kept_graphs;
mod model;
mod options;
mod outputs;
mod plans;
mod precision;
mod prefetch;
mod refusals;
mod resume;
mod traffic;
