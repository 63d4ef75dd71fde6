//! Layers with the names, constructors and parameter names of candle-nn, and a fast differentiable
//! forward pass.
//!
//! A model becomes trainable by changing its `use` line from `candle_nn` to `use
//! fused_ops::layers::{Linear, RmsNorm, linear_no_bias, rms_norm};`. Each layer converts from
//! candle-nn's layer. The constructor functions take the same arguments and load or initialize the
//! same parameters.

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
