//! Tests across crates, from a user's seat.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod api;
mod device;
mod padding;
mod pipeline;
