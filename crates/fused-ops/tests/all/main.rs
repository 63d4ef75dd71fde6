//! The operations as their users see them.

#![allow(
    clippy::unwrap_used,
    clippy::float_cmp,
    reason = "a test fails by panicking, and bits are compared"
)]

mod checkpoint;
mod layers;
mod passes;
mod refusals;
mod support;
mod values;
