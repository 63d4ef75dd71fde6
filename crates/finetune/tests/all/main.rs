//! Tests of the models.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod models;
