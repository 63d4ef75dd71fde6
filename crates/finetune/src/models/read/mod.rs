//! Reader of `config.json` files of transformers.
//!
//! Every field that affects the results of a model is read or rejected. A reader that skips such
//! fields would silently compute other results than the model's author.

mod families;
mod fields;
mod rope;

use candle_core::DType;

use crate::models::{
    config::DecoderConfig,
    error::{ModelError, difference, field_error},
    read::{families::FAMILIES, fields::Fields},
};

/// Parts of the names of other models, and their constructs.
const CONSTRUCTS: [(&str, &str); 23] = [
    ("ForSequenceClassification", "a classifier"),
    ("Apertus", "the activation xIELU"),
    ("Arcee", "networks without a gate"),
    ("Bert", "an encoder"),
    ("Cohere", "parallel blocks with layer norms"),
    ("Deepseek", "multi-head latent attention"),
    ("Falcon", "Mamba, or parallel blocks"),
    ("GPT2", "layer norms"),
    ("GPTNeoX", "layer norms"),
    ("Gemma4", "inputs per layer"),
    ("Glm4Moe", "experts"),
    ("GraniteMoe", "Mamba and experts"),
    ("HunYuan", "norms after the rotation"),
    ("Jamba", "Mamba"),
    ("Kimi", "multi-head latent attention"),
    ("Lfm2", "convolutions"),
    ("Llama4", "attention in chunks, and experts"),
    ("MiMo", "prediction of several tokens"),
    ("NemotronH", "Mamba"),
    ("Nemotron", "networks without a gate"),
    ("Qwen3Next", "gated delta nets"),
    ("Qwen3_5", "gated delta nets"),
    ("Starcoder", "layer norms"),
];

impl DecoderConfig {
    /// Reads a `config.json`, in the layout of transformers 4 (`rope_theta`, `rope_scaling`,
    /// `torch_dtype`) or 5 (`rope_parameters`, `dtype`).
    ///
    /// # Errors
    ///
    /// [`ModelError::Json`] if it cannot be read; [`ModelError::Field`] for a missing field, or an
    /// unsupported architecture, activation, scaling or quantization.
    /// [`Decoder::from_config`](crate::models::Decoder::from_config) checks the ranges.
    ///
    /// # Examples
    ///
    /// ```
    /// use finetune::models::DecoderConfig;
    ///
    /// let config = r#"{
    ///     "architectures": ["Qwen3ForCausalLM"], "vocab_size": 320, "hidden_size": 40,
    ///     "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    ///     "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    ///     "rms_norm_eps": 1e-6, "dtype": "bfloat16",
    ///     "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}
    /// }"#;
    /// let config = DecoderConfig::from_json(config)?;
    /// assert_eq!((config.head_dim, config.ropes[0].theta), (8, 1e6));
    /// assert!(config.qk_norm.is_some());
    /// # Ok::<(), finetune::models::ModelError>(())
    /// ```
    pub fn from_json(json: &str) -> Result<Self, ModelError> {
        let fields = Fields::parse(json)?;
        let read = family(&fields)?;
        reject_foreign(&fields)?;
        read(&fields)
    }
}

/// Returns the reader of the family. Exactly one of the architectures must be supported; a file without
/// architectures names its family in `model_type`.
fn family(fields: &Fields) -> Result<families::Read, ModelError> {
    let found: Vec<String> = fields.list("architectures", "a list of names")?.unwrap_or_default();
    let model_type = fields.text("model_type")?;
    let by_type = model_type.filter(|_| found.is_empty());
    let mut supported = FAMILIES.iter().filter(|family| {
        found.iter().any(|name| name == family.architecture)
            || by_type.as_deref() == Some(family.model_type)
    });
    if let (Some(family), None) = (supported.next(), supported.next()) {
        return Ok(family.read);
    }
    let is_part = |part: &str| found.iter().any(|name| name.contains(part));
    let construct = CONSTRUCTS.iter().find(|(part, _)| is_part(part));
    let construct = construct.map_or(String::new(), |(_, construct)| format!(" ({construct})"));
    let names: Vec<&str> = FAMILIES.iter().map(|family| family.architecture).collect();
    let expected = format!("one of {}", names.join(", "));
    Err(field_error("architectures", &format!("{found:?}{construct}"), expected))
}

/// Rejects settings that no supported model has.
fn reject_foreign(fields: &Fields) -> Result<(), ModelError> {
    if fields.is_given("quantization_config") {
        let expected = "missing: the weights are quantized, which is not supported. Take the \
                        model's folder with weights in f32, f16 or bf16";
        return Err(field_error("quantization_config", &"given", expected.into()));
    }
    for field in ["attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout"] {
        if let Some(rate) = fields.real(field)?.filter(|rate| *rate != 0.) {
            return Err(field_error(field, &rate, "0: dropout is not supported".into()));
        }
    }
    for field in [
        "use_bidirectional_attention",
        "is_encoder_decoder",
        "use_qk_norm",
        "qk_layernorm",
        "attention_k_eq_v",
        "attn_output_gate",
        "output_router_logits",
    ] {
        if fields.flag(field)?.unwrap_or(false) {
            return Err(field_error(field, &true, "false: it is not supported".into()));
        }
    }
    for field in
        ["clip_qkv", "attention_chunk_size", "attn_temperature_tuning", "num_kv_shared_layers"]
    {
        if fields.is_given(field) {
            return Err(field_error(field, &"given", "missing: it is not supported".into()));
        }
    }
    Ok(())
}

fn dtype(fields: &Fields) -> Result<DType, ModelError> {
    let name = match (fields.text("torch_dtype")?, fields.text("dtype")?) {
        (Some(old), Some(new)) if old != new => {
            return Err(difference("torch_dtype", "dtype"));
        }
        (old, new) => new.or(old),
    };
    match name.as_deref().unwrap_or("float32") {
        "float32" => Ok(DType::F32),
        "bfloat16" => Ok(DType::BF16),
        "float16" => Ok(DType::F16),
        other => Err(field_error("dtype", &other, "float32, bfloat16 or float16".into())),
    }
}
