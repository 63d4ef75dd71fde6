//! Sharded models: bitwise equality with data parallel and plain candle, rejected input, failures.

mod accumulation;
mod bits;
mod faults;
mod in_backward;
mod kept_graphs;
mod model;
mod outputs;
mod outside;
mod plans;
mod precision;
mod prefetch;
mod refusals;
mod resume;
mod tied;
mod traffic;
