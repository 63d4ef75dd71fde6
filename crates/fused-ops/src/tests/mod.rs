//! Every operation compared with its composed form: values, gradients, errors, odd shapes, strides,
//! and NaN.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    reason = "indices are small, and bits are compared"
)]

mod agreement;
mod bits;
mod gradients;
mod odd;
mod support;
