#![doc = include_str!("../README.md")]

mod activation;
mod attention;
mod autograd;
mod checkpoint;
mod composed;
mod config;
mod cross_entropy;
mod custom;
mod dropout;
mod embedding;
mod error;
mod kernels;
mod linear;
mod linear_add_rms_norm;
mod linear_rope;
mod mlp;
mod norm;
mod rope;
mod route;
mod softmax;
mod swiglu_mlp;
#[cfg(test)]
mod tests;

pub mod layers;

pub use crate::{
    activation::{gelu, gelu_tanh, silu, swiglu},
    attention::{attention, attention_packed},
    checkpoint::checkpoint,
    config::{Activation, AttentionConfig, DropoutKey},
    cross_entropy::{CrossEntropy, CrossEntropyConfig, cross_entropy},
    custom::{backward_from, backward_from_many, with_backward, with_backward_many},
    dropout::dropout,
    embedding::embedding,
    error::{Error, Result},
    linear::linear,
    linear_add_rms_norm::linear_add_rms_norm,
    linear_rope::linear_rope,
    mlp::mlp,
    norm::{add_layer_norm, add_rms_norm, layer_norm, rms_norm},
    rope::{rope, rope_i, rope_i_thd, rope_thd},
    softmax::{log_softmax, softmax},
    swiglu_mlp::swiglu_mlp,
};
