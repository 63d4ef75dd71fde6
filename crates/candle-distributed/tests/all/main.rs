//! Tests of the examples that train one model whole and sharded.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[cfg(all(feature = "candle", feature = "ops", feature = "serde"))]
mod examples;
