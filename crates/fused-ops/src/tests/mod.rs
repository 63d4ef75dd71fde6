//! Comparisons of every operation with its composed form: values, gradients, errors, empty and
//! strided inputs, and NaN.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    reason = "indices are small, and bits are compared"
)]

mod agreement;
mod bits;
mod direct;
mod edge_cases;
mod frozen;
mod gradients;
mod reference;
mod support;
