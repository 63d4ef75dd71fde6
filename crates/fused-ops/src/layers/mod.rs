//! Layers with the names, constructors and parameter names of candle-nn's, whose forward pass is
//! differentiable and fast.
//!
//! A model becomes trainable by another `use` line: `use fused_ops::layers::{Linear, RmsNorm,
//! linear_no_bias, rms_norm};` where it said `candle_nn`. Each layer converts from candle-nn's, and
//! the functions that make one take the same arguments and load or initialize the same parameters.

mod attention;
mod embedding;
mod linear;
mod mlp;
mod norm;
mod swiglu;

pub use self::{
    attention::{Attention, AttentionSizes},
    embedding::{Embedding, embedding},
    linear::{Linear, linear, linear_no_bias},
    mlp::Mlp,
    norm::{LayerNorm, RmsNorm, layer_norm, rms_norm},
    swiglu::SwiGlu,
};
