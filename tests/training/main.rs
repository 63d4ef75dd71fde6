//! Models of a user's own: they train on any number of devices as on one, or are refused by name.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod refused;
mod same_losses;
