//! Every operation beside its composed form: values, gradients, errors, odd shapes, strides, and what is no number.

mod agreement;
mod bits;
mod gradients;
mod odd;
mod support;
