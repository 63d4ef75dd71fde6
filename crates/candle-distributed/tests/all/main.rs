//! Tests of the examples.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[cfg(all(feature = "candle", feature = "ops", feature = "serde"))]
mod examples;
