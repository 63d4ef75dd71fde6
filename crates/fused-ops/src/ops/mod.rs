//! The operations: one file each, with its kernel forward and its backward.

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod cross_entropy;
pub(crate) mod dropout;
pub(crate) mod embedding;
pub(crate) mod linear;
pub(crate) mod linear_add_rms_norm;
pub(crate) mod linear_cross_entropy;
pub(crate) mod linear_decode;
pub(crate) mod linear_rope;
pub(crate) mod mlp;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod softmax;
pub(crate) mod swiglu_mlp;
