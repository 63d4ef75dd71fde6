//! [`AttentionConfig`]: crate::AttentionConfig
//! [`add_rms_norm`]: crate::add_rms_norm()
//! [`attention`]: crate::attention()
//! [`attention_packed`]: crate::attention_packed()
//! [`backward_from_many`]: crate::backward_from_many()
//! [`checkpoint`]: crate::checkpoint()
//! [`cross_entropy`]: crate::cross_entropy()
//! [`dropout`]: crate::dropout()
//! [`embedding`]: crate::embedding()
//! [`geglu`]: crate::geglu()
//! [`gelu`]: crate::gelu()
//! [`gelu_tanh`]: crate::gelu_tanh()
//! [`grouped_linear`]: crate::grouped_linear()
//! [`layer_norm`]: crate::layer_norm()
//! [`linear`]: crate::linear()
//! [`linear_add_rms_norm`]: crate::linear_add_rms_norm()
//! [`linear_cross_entropy`]: crate::linear_cross_entropy()
//! [`linear_decode`]: crate::linear_decode()
//! [`linear_rope`]: crate::linear_rope()
//! [`log_softmax`]: crate::log_softmax()
//! [`lora_linear`]: crate::lora_linear()
//! [`mlp`]: crate::mlp()
//! [`rms_norm`]: crate::rms_norm()
//! [`rope`]: crate::rope()
//! [`rope_i`]: crate::rope_i()
//! [`rope_i_thd`]: crate::rope_i_thd()
//! [`rope_thd`]: crate::rope_thd()
//! [`silu`]: crate::silu()
//! [`softmax`]: crate::softmax()
//! [`swiglu`]: crate::swiglu()
//! [`swiglu_mlp`]: crate::swiglu_mlp()
//! [`with_backward`]: crate::with_backward()
//! [`with_backward_many`]: crate::with_backward_many()
// The README defines these links too, to the registry. The first of two definitions counts, so on
// this page the links go to the crate itself.
#![doc = include_str!("../README.md")]

mod affine;
mod autograd;
mod composed;
mod config;
mod custom;
mod error;
mod kernels;
mod ops;
mod recompute;
mod route;
#[cfg(test)]
mod tests;
mod weight;

pub mod layers;

pub use crate::{
    autograd::with_direct_grads,
    config::{Activation, AttentionConfig, DropoutKey},
    custom::{backward_from_many, with_backward, with_backward_many},
    error::{Error, Result},
    ops::{
        activation::{geglu, gelu, gelu_tanh, silu, swiglu},
        attention::{attention, attention_packed},
        cross_entropy::{CrossEntropy, CrossEntropyConfig, cross_entropy},
        dropout::dropout,
        embedding::embedding,
        linear::{
            grouped::{ExpertWeights, grouped_linear},
            linear, lora_linear,
        },
        linear_add_rms_norm::linear_add_rms_norm,
        linear_cross_entropy::linear_cross_entropy,
        linear_decode::linear_decode,
        linear_rope::linear_rope,
        mlp::mlp,
        norm::{add_rms_norm, layer_norm, rms_norm},
        rope::{rope, rope_i, rope_i_thd, rope_thd},
        softmax::{log_softmax, softmax},
        swiglu_mlp::swiglu_mlp,
    },
    recompute::checkpoint,
};
