//! Reader of `config.json` files of transformers.
//!
//! Every field that affects the results of a model is read or rejected. A reader that skips such
//! fields would silently compute other results than the model's author.

use candle_core::DType;
use serde::Deserialize;
use serde_json::Value;

use crate::models::{
    config::LlamaConfig,
    error::{ModelError, difference, field_error},
    scaling::RopeScaling,
};

/// The fields of all layouts.
#[derive(Debug, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "the fields are those of the file")]
struct Fields {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    hidden_act: Option<String>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    attention_dropout: f64,
    initializer_range: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeFields>,
    rope_parameters: Option<RopeFields>,
    partial_rotary_factor: Option<f64>,
    #[serde(default)]
    sliding_window: Window,
    #[serde(default)]
    use_sliding_window: bool,
    layer_types: Option<Vec<String>>,
    torch_dtype: Option<String>,
    dtype: Option<String>,
}

/// The attention window. A missing field and `null` have different meanings.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(untagged, expecting = "sliding_window must be a number of tokens, or null")]
enum Window {
    #[default]
    #[serde(skip)]
    Missing,
    Given(Option<usize>),
}

/// The fields that are checked before all others, since other models may have other fields.
#[derive(Debug, Deserialize)]
struct ArchitectureFields {
    #[serde(default)]
    architectures: Vec<String>,
    quantization_config: Option<Value>,
}

/// The fields of rotary positions. Unknown fields and settings per layer are rejected, since they
/// would change the rotation.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct RopeFields {
    rope_type: Option<String>,
    /// Older name of `rope_type`.
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    partial_rotary_factor: Option<f64>,
}

/// The supported architectures, which differ only in their fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Architecture {
    Llama,
    Qwen2,
    Mistral,
}

const ARCHITECTURES: [(&str, Architecture); 3] = [
    ("LlamaForCausalLM", Architecture::Llama),
    ("Qwen2ForCausalLM", Architecture::Qwen2),
    ("MistralForCausalLM", Architecture::Mistral),
];

/// The default base of the rotary frequencies, as in the first Llama.
const ROPE_THETA: f64 = 10_000.;

impl LlamaConfig {
    /// Reads a `config.json`, in the layout of transformers 4 (`rope_theta`, `rope_scaling`,
    /// `torch_dtype`) or 5 (`rope_parameters`, `dtype`).
    ///
    /// # Errors
    ///
    /// [`ModelError::Json`] if it cannot be read; [`ModelError::Field`] for an unsupported architecture,
    /// activation, bias, scaling or quantization.
    /// [`Llama::from_config`](crate::models::Llama::from_config) checks the sizes.
    ///
    /// # Examples
    ///
    /// ```
    /// use finetune::models::LlamaConfig;
    ///
    /// let config = r#"{
    ///     "architectures": ["MistralForCausalLM"], "vocab_size": 320, "hidden_size": 40,
    ///     "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    ///     "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    ///     "rms_norm_eps": 1e-5, "dtype": "bfloat16", "sliding_window": null,
    ///     "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}
    /// }"#;
    /// let config = LlamaConfig::from_json(config)?;
    /// assert_eq!((config.head_dim, config.rope_theta), (8, 1e6));
    /// # Ok::<(), finetune::models::ModelError>(())
    /// ```
    pub fn from_json(json: &str) -> Result<Self, ModelError> {
        let architecture_fields: ArchitectureFields = serde_json::from_str(json)?;
        let architecture = architecture(&architecture_fields.architectures)?;
        if architecture_fields.quantization_config.is_some_and(|config| !config.is_null()) {
            let expected = "missing: the weights are quantized, which is not supported. Take the \
                            model's folder with weights in f32, f16 or bf16";
            return Err(field_error("quantization_config", &"given", expected.into()));
        }
        let fields: Fields = serde_json::from_str(json)?;
        check_supported(&fields, architecture)?;
        let rope = rope(&fields)?;
        Ok(LlamaConfig {
            vocab_size: fields.vocab_size,
            hidden_size: fields.hidden_size,
            intermediate_size: fields.intermediate_size,
            num_hidden_layers: fields.num_hidden_layers,
            num_attention_heads: fields.num_attention_heads,
            num_key_value_heads: key_value_heads(&fields, architecture)?,
            head_dim: head_dim(&fields)?,
            max_position_embeddings: fields.max_position_embeddings,
            rms_norm_eps: fields.rms_norm_eps,
            rope_theta: rope_theta(&fields, rope)?,
            rope_scaling: rope.map_or(Ok(RopeScaling::Default), scaling)?,
            tie_word_embeddings: fields.tie_word_embeddings,
            attention_bias: architecture == Architecture::Qwen2,
            sliding_window: sliding_window(&fields, architecture)?,
            initializer_range: fields.initializer_range.unwrap_or(0.02),
            dtype: dtype(&fields)?,
        })
    }
}

/// Returns the architecture with one of these names. Exactly one name must be supported.
fn architecture(found: &[String]) -> Result<Architecture, ModelError> {
    let mut supported = Vec::new();
    for name in found {
        supported.extend(ARCHITECTURES.iter().filter(|(supported_name, _)| supported_name == name));
    }
    let [(_, architecture)] = supported[..] else {
        let names = ARCHITECTURES.map(|(name, _)| name).join(", ");
        return Err(field_error("architectures", &format!("{found:?}"), format!("one of {names}")));
    };
    Ok(architecture)
}

/// Rejects settings that no supported model has.
#[expect(clippy::float_cmp, reason = "only a factor of exactly 1 rotates the whole head")]
fn check_supported(fields: &Fields, architecture: Architecture) -> Result<(), ModelError> {
    if let Some(activation) = fields.hidden_act.as_ref().filter(|name| *name != "silu") {
        return Err(field_error("hidden_act", &activation, "silu".into()));
    }
    // Qwen 2 always has biases, and ignores this field.
    let has_bias = fields.attention_bias && architecture != Architecture::Qwen2;
    for (field, bias) in [("attention_bias", has_bias), ("mlp_bias", fields.mlp_bias)] {
        if bias {
            return Err(field_error(field, &bias, "false in this architecture".into()));
        }
    }
    if fields.attention_dropout != 0. {
        let expected = "0: dropout is not supported".into();
        return Err(field_error("attention_dropout", &fields.attention_dropout, expected));
    }
    let ropes = [&fields.rope_scaling, &fields.rope_parameters];
    let factors = ropes.into_iter().flatten().filter_map(|rope| rope.partial_rotary_factor);
    for factor in factors.chain(fields.partial_rotary_factor) {
        if factor != 1. {
            return Err(field_error("partial_rotary_factor", &factor, "1".into()));
        }
    }
    Ok(())
}

fn key_value_heads(fields: &Fields, architecture: Architecture) -> Result<usize, ModelError> {
    match (fields.num_key_value_heads, architecture) {
        (Some(heads), _) => Ok(heads),
        (None, Architecture::Llama) => Ok(fields.num_attention_heads),
        // The default of transformers depends on its version.
        (None, Architecture::Qwen2 | Architecture::Mistral) => {
            Err(field_error("num_key_value_heads", &"missing", "given in this architecture".into()))
        }
    }
}

/// Returns the attention window by the rules of the architecture, or `None` without a window.
fn sliding_window(
    fields: &Fields,
    architecture: Architecture,
) -> Result<Option<usize>, ModelError> {
    let layer_types = fields.layer_types.iter().flatten();
    let has_window_layers = layer_types.into_iter().any(|name| name != "full_attention");
    match (architecture, fields.sliding_window) {
        (Architecture::Llama, _) if !has_window_layers => Ok(None),
        (Architecture::Qwen2, _) if !fields.use_sliding_window => Ok(None),
        (_, Window::Given(window)) => Ok(window),
        (_, Window::Missing) => {
            let expected = "given in this architecture, null for none".into();
            Err(field_error("sliding_window", &"missing", expected))
        }
    }
}

fn head_dim(fields: &Fields) -> Result<usize, ModelError> {
    let hidden = fields.hidden_size;
    let heads = fields.num_attention_heads;
    match fields.head_dim {
        Some(size) => Ok(size),
        None if heads > 0 && hidden.is_multiple_of(heads) => Ok(hidden / heads),
        None => {
            let expected = format!("a divisor of hidden_size {hidden}, or head_dim given");
            Err(field_error("num_attention_heads", &heads, expected))
        }
    }
}

/// Returns the fields of rotary positions in either layout.
fn rope(fields: &Fields) -> Result<Option<&RopeFields>, ModelError> {
    match (&fields.rope_scaling, &fields.rope_parameters) {
        (Some(scaling), Some(parameters)) if scaling != parameters => {
            Err(difference("rope_scaling", "rope_parameters"))
        }
        (first, second) => Ok(second.as_ref().or(first.as_ref())),
    }
}

fn rope_theta(fields: &Fields, rope: Option<&RopeFields>) -> Result<f64, ModelError> {
    match (fields.rope_theta, rope.and_then(|rope| rope.rope_theta)) {
        (Some(outer), Some(inner)) if outer.to_bits() != inner.to_bits() => {
            Err(difference("rope_theta", "rope_parameters.rope_theta"))
        }
        (outer, inner) => Ok(inner.or(outer).unwrap_or(ROPE_THETA)),
    }
}

fn scaling(rope: &RopeFields) -> Result<RopeScaling, ModelError> {
    if let (Some(new), Some(old)) = (&rope.rope_type, &rope.old_type)
        && new != old
    {
        return Err(difference("rope_scaling.rope_type", "rope_scaling.type"));
    }
    let read_factor = || required("rope_scaling.factor", rope.factor);
    match rope.rope_type.as_ref().or(rope.old_type.as_ref()).map_or("default", String::as_str) {
        "default" => Ok(RopeScaling::Default),
        "linear" => Ok(RopeScaling::Linear { factor: read_factor()? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: read_factor()?,
            low_freq_factor: required("rope_scaling.low_freq_factor", rope.low_freq_factor)?,
            high_freq_factor: required("rope_scaling.high_freq_factor", rope.high_freq_factor)?,
            original_max_position_embeddings: required(
                "rope_scaling.original_max_position_embeddings",
                rope.original_max_position_embeddings,
            )?,
        }),
        other => Err(field_error("rope_scaling.type", &other, "default, linear or llama3".into())),
    }
}

/// Returns the value of a field that the type of scaling requires.
fn required<T>(field: &'static str, value: Option<T>) -> Result<T, ModelError> {
    value.ok_or_else(|| field_error(field, &"missing", "given for this type of scaling".into()))
}

fn dtype(fields: &Fields) -> Result<DType, ModelError> {
    let name = match (&fields.torch_dtype, &fields.dtype) {
        (Some(old), Some(new)) if old != new => {
            return Err(difference("torch_dtype", "dtype"));
        }
        (old, new) => new.as_ref().or(old.as_ref()),
    };
    match name.map_or("float32", String::as_str) {
        "float32" => Ok(DType::F32),
        "bfloat16" => Ok(DType::BF16),
        "float16" => Ok(DType::F16),
        other => Err(field_error("dtype", &other, "float32, bfloat16 or float16".into())),
    }
}
