//! The families of decoders: their differences from Llama, and their values of missing fields.
//!
//! The reader of a family is the only place that knows its name. A missing field takes a default only if
//! transformers has had the same one in all versions.

use fused_ops::Activation;

use crate::models::{
    config::{
        Biases, BlockNorms, Clamp, DecoderConfig, ExpertNames, ExpertsConfig, LayerConfig, QkNorm,
        Routing,
    },
    error::{ModelError, field_error},
    names::TEXT_PART,
    read::{
        dtype,
        fields::{Fields, missing},
        reject_foreign,
        rope::{RopeReader, THETA},
    },
    rope::{RopeConfig, RopePairs},
    scaling::RopeScaling,
};

type Result<T> = std::result::Result<T, ModelError>;

/// Reads the description of a family's model.
pub(super) type Read = fn(&Fields) -> Result<DecoderConfig>;

/// A family, by the names of its models in `config.json`.
pub(super) struct Family {
    pub(super) architecture: &'static str,
    pub(super) model_type: &'static str,
    pub(super) read: Read,
}

const fn family(architecture: &'static str, model_type: &'static str, read: Read) -> Family {
    Family { architecture, model_type, read }
}

/// All families, in alphabetical order but for the first.
pub(super) const FAMILIES: [Family; 24] = [
    family("LlamaForCausalLM", "llama", llama),
    family("Ernie4_5ForCausalLM", "ernie4_5", ernie4_5),
    family("Exaone4ForCausalLM", "exaone4", exaone4),
    family("GemmaForCausalLM", "gemma", gemma),
    family("Gemma2ForCausalLM", "gemma2", gemma2),
    family("Gemma3ForCausalLM", "gemma3_text", gemma3),
    family("Gemma3ForConditionalGeneration", "gemma3", gemma3_text_part),
    family("GlmForCausalLM", "glm", glm),
    family("Glm4ForCausalLM", "glm4", glm4),
    family("GptOssForCausalLM", "gpt_oss", gpt_oss),
    family("GraniteForCausalLM", "granite", granite),
    family("MinistralForCausalLM", "ministral", ministral),
    family("Ministral3ForCausalLM", "ministral3", ministral3),
    family("MistralForCausalLM", "mistral", mistral),
    family("Mistral3ForConditionalGeneration", "mistral3", mistral3_text_part),
    family("MixtralForCausalLM", "mixtral", mixtral),
    family("Olmo2ForCausalLM", "olmo2", olmo2),
    family("Olmo3ForCausalLM", "olmo3", olmo3),
    family("Phi3ForCausalLM", "phi3", phi3),
    family("Qwen2ForCausalLM", "qwen2", qwen2),
    family("Qwen3ForCausalLM", "qwen3", qwen3),
    family("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe),
    family("SeedOssForCausalLM", "seed_oss", seed_oss),
    family("SmolLM3ForCausalLM", "smollm3", smollm3),
];

/// The values of missing fields.
struct Defaults {
    head_dim: Option<usize>,
    /// Whether there are as many key heads as query heads.
    key_heads: bool,
    rms_norm_eps: Option<f64>,
    tied: bool,
    activation: Activation,
    pairs: RopePairs,
    /// The part of a head that turns.
    rotated: f64,
}

/// The defaults of most families: sizes are given, and heads divide the hidden size.
const GIVEN: Defaults = Defaults {
    head_dim: None,
    key_heads: false,
    rms_norm_eps: None,
    tied: false,
    activation: Activation::Silu,
    pairs: RopePairs::Halves,
    rotated: 1.,
};

/// Returns a model that differs from Llama only in its fields.
fn base(fields: &Fields, defaults: &Defaults) -> Result<DecoderConfig> {
    base_with_theta(fields, defaults, THETA)
}

/// Like [`base`], with another base of the frequencies if none is given.
fn base_with_theta(fields: &Fields, defaults: &Defaults, theta: f64) -> Result<DecoderConfig> {
    let config = base_without_ropes(fields, defaults)?;
    let ropes = vec![rope_reader(fields, defaults, &config).read(theta)?];
    Ok(DecoderConfig { ropes, ..config })
}

fn base_without_ropes(fields: &Fields, defaults: &Defaults) -> Result<DecoderConfig> {
    let num_attention_heads = fields.required_size("num_attention_heads")?;
    let hidden_size = fields.required_size("hidden_size")?;
    let n_layers = fields.required_size("num_hidden_layers")?;
    let head_dim = match fields.size("head_dim")?.or(defaults.head_dim) {
        Some(size) => size,
        None => divided_head_dim(hidden_size, num_attention_heads)?,
    };
    check_activation(fields, defaults.activation)?;
    let key_heads = fields.size("num_key_value_heads")?;
    let key_heads = key_heads.or(defaults.key_heads.then_some(num_attention_heads));
    let eps = fields.real("rms_norm_eps")?.or(defaults.rms_norm_eps);
    if n_layers > DecoderConfig::MAX_LAYERS {
        let expected = format!("1 to {}", DecoderConfig::MAX_LAYERS);
        return Err(field_error("num_hidden_layers", &n_layers, expected));
    }
    Ok(DecoderConfig {
        vocab_size: fields.required_size("vocab_size")?,
        hidden_size,
        intermediate_size: fields.required_size("intermediate_size")?,
        num_attention_heads,
        num_key_value_heads: key_heads.ok_or_else(|| missing("num_key_value_heads"))?,
        head_dim,
        max_position_embeddings: fields.required_size("max_position_embeddings")?,
        rms_norm_eps: eps.ok_or_else(|| missing("rms_norm_eps"))?,
        name_prefix: "",
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(defaults.tied),
        initializer_range: fields.real("initializer_range")?.unwrap_or(0.02),
        dtype: dtype(fields)?,
        layers: vec![LayerConfig { rope: Some(0), window: None, has_experts: false }; n_layers],
        ropes: Vec::new(),
        norms: BlockNorms::Before,
        norm_offset: 0.,
        qk_norm: None,
        attention_scale: 1. / (head_dim as f64).sqrt(),
        attention_softcap: None,
        query_scale: None,
        sinks: false,
        experts: None,
        biases: Biases::default(),
        fused_qkv: false,
        fused_gate_up: false,
        activation: defaults.activation,
        embedding_scale: 1.,
        residual_scale: 1.,
        logit_scale: 1.,
        logit_softcap: None,
    })
}

fn divided_head_dim(hidden: usize, heads: usize) -> Result<usize> {
    if heads > 0 && hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    let expected = format!("a divisor of hidden_size {hidden}, or head_dim given");
    Err(field_error("num_attention_heads", &heads, expected))
}

fn check_activation(fields: &Fields, activation: Activation) -> Result<()> {
    let (names, expected) = match activation {
        Activation::GeluTanh => (&["gelu_pytorch_tanh"][..], "gelu_pytorch_tanh"),
        _ => (&["silu", "swish"][..], "silu"),
    };
    for field in ["hidden_act", "hidden_activation"] {
        if let Some(name) = fields.text(field)?.filter(|name| !names.contains(&name.as_str())) {
            return Err(field_error(field, &name, expected.into()));
        }
    }
    Ok(())
}

fn rope_reader<'a>(
    fields: &'a Fields,
    defaults: &Defaults,
    config: &DecoderConfig,
) -> RopeReader<'a> {
    let Defaults { pairs, rotated, .. } = *defaults;
    RopeReader { fields, head_dim: config.head_dim, pairs, part: rotated }
}

/// Returns for each layer whether it has a window: by `layer_types`, or else by a rule.
fn has_window(
    fields: &Fields,
    config: &DecoderConfig,
    rule: impl Fn(usize) -> bool,
) -> Result<Vec<bool>> {
    let n_layers = config.layers.len();
    let Some(types) = fields.list::<String>("layer_types", "a list of names")? else {
        return Ok((0..n_layers).map(rule).collect());
    };
    if types.len() != n_layers {
        let found = format!("{} names", types.len());
        return Err(field_error("layer_types", &found, format!("{n_layers}, one for each layer")));
    }
    let kind = |name: &String| match name.as_str() {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(true),
        other => {
            let expected = "full_attention or sliding_attention: others are not supported".into();
            Err(field_error("layer_types", &other, expected))
        }
    };
    types.iter().map(kind).collect()
}

/// Gives some layers a window, by `layer_types` or else by a rule.
fn set_windows(
    fields: &Fields,
    config: &mut DecoderConfig,
    window: Option<usize>,
    rule: impl Fn(usize) -> bool,
) -> Result<()> {
    let has_window = has_window(fields, config, |layer| window.is_some() && rule(layer))?;
    for (layer, has_window) in config.layers.iter_mut().zip(has_window) {
        if has_window {
            layer.window = Some(window.ok_or_else(|| missing("sliding_window"))?);
        }
    }
    Ok(())
}

/// Rejects windows in `layer_types` of a family that has none.
fn reject_windows(fields: &Fields, config: &DecoderConfig) -> Result<()> {
    if has_window(fields, config, |_| false)?.contains(&true) {
        let expected = "full_attention in this architecture".into();
        return Err(field_error("layer_types", &"sliding_attention", expected));
    }
    Ok(())
}

/// Returns the window of a family with `use_sliding_window`, if it is in use.
fn used_window(fields: &Fields) -> Result<Option<usize>> {
    if !fields.flag("use_sliding_window")?.unwrap_or(false) {
        return Ok(None);
    }
    match fields.size("sliding_window")? {
        None if fields.is_null("sliding_window") => Ok(None),
        window => window.map(Some).ok_or_else(|| missing("sliding_window")),
    }
}

/// Returns the window of a family in which a missing one is `default`, and null is none.
fn window_or(fields: &Fields, default: Option<usize>) -> Result<Option<usize>> {
    let default = default.filter(|_| !fields.is_null("sliding_window"));
    Ok(fields.size("sliding_window")?.or(default))
}

/// Returns the distance between two layers of a kind.
fn period(fields: &Fields, field: &'static str, default: usize) -> Result<usize> {
    match fields.size(field)?.unwrap_or(default) {
        0 => Err(field_error(field, &0, "at least 1".into())),
        period => Ok(period),
    }
}

fn real_or(fields: &Fields, field: &'static str, default: f64) -> Result<f64> {
    Ok(fields.real(field)?.unwrap_or(default))
}

/// Reads the text part of a model that also sees images. A missing type is that of the first family.
fn text_part(fields: &Fields, families: &[(&str, Read)]) -> Result<DecoderConfig> {
    let text = fields.text_part()?;
    reject_foreign(&text)?;
    let model_type = text.text("model_type")?;
    let is_found = |name: &str| model_type.as_ref().is_none_or(|found| found == name);
    let Some((_, read)) = families.iter().find(|(name, _)| is_found(name)) else {
        let names: Vec<&str> = families.iter().map(|(name, _)| *name).collect();
        let found = model_type.unwrap_or_default();
        return Err(field_error("text_config.model_type", &found, names.join(" or ")));
    };
    Ok(DecoderConfig { name_prefix: TEXT_PART, ..read(&text)? })
}

fn gemma3_text_part(fields: &Fields) -> Result<DecoderConfig> {
    text_part(fields, &[("gemma3_text", gemma3)])
}

/// Mistral Small 3.1 and later, or Ministral 3.
fn mistral3_text_part(fields: &Fields) -> Result<DecoderConfig> {
    text_part(fields, &[("mistral", mistral), ("ministral3", ministral3)])
}

fn llama(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &Defaults { key_heads: true, ..GIVEN })?;
    let attention = fields.flag("attention_bias")?.unwrap_or(false);
    let mlp = fields.flag("mlp_bias")?.unwrap_or(false);
    config.biases = Biases { qkv: attention, output: attention, mlp };
    reject_windows(fields, &config)?;
    Ok(config)
}

fn qwen2(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &GIVEN)?;
    // The field attention_bias is ignored.
    config.biases.qkv = true;
    set_qwen_windows(fields, &mut config)?;
    Ok(config)
}

fn qwen3(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &Defaults { head_dim: Some(128), ..GIVEN })?;
    config.qk_norm = Some(QkNorm::PerHead);
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    config.biases = Biases { qkv: bias, output: bias, mlp: false };
    set_qwen_windows(fields, &mut config)?;
    Ok(config)
}

fn qwen3_moe(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = qwen3(fields)?;
    let step = period(fields, "decoder_sparse_step", 1)?;
    let dense: Vec<usize> = fields.list("mlp_only_layers", "a list of layers")?.unwrap_or_default();
    for (n, layer) in config.layers.iter_mut().enumerate() {
        layer.has_experts = (n + 1).is_multiple_of(step) && !dense.contains(&n);
    }
    let is_renormalized = fields.flag("norm_topk_prob")?.unwrap_or(false);
    config.experts = Some(ExpertsConfig {
        n: n_experts(fields)?,
        per_token: fields.required_size("num_experts_per_tok")?,
        inner: fields.required_size("moe_intermediate_size")?,
        routing: if is_renormalized { Routing::SoftmaxRenormalized } else { Routing::Softmax },
        names: ExpertNames::Separate(["gate_proj", "up_proj", "down_proj"]),
    });
    Ok(config)
}

/// Returns the number of experts. Its field has one name in transformers 4 and another in 5.
fn n_experts(fields: &Fields) -> Result<usize> {
    let n_experts = fields.size("num_experts")?.or(fields.size("num_local_experts")?);
    n_experts.ok_or_else(|| missing("num_experts"))
}

fn mixtral(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base_with_theta(fields, &GIVEN, 1e6)?;
    if let Some(noise) = fields.real("router_jitter_noise")?.filter(|noise| *noise != 0.) {
        return Err(field_error("router_jitter_noise", &noise, "0: it is not supported".into()));
    }
    let window = window_or(fields, None)?;
    set_windows(fields, &mut config, window, |_| true)?;
    set_experts(fields, &mut config, Routing::SoftmaxRenormalized, MIXTRAL_NAMES)?;
    Ok(config)
}

/// Gate, up and down of an expert.
const MIXTRAL_NAMES: ExpertNames = ExpertNames::Separate(["w1", "w3", "w2"]);

/// Gives all layers experts of the width `intermediate_size`.
fn set_experts(
    fields: &Fields,
    config: &mut DecoderConfig,
    routing: Routing,
    names: ExpertNames,
) -> Result<()> {
    let per_token = fields.size("num_experts_per_tok")?.or(fields.size("experts_per_token")?);
    config.experts = Some(ExpertsConfig {
        n: n_experts(fields)?,
        per_token: per_token.ok_or_else(|| missing("num_experts_per_tok"))?,
        inner: config.intermediate_size,
        routing,
        names,
    });
    config.layers.iter_mut().for_each(|layer| layer.has_experts = true);
    Ok(())
}

fn gpt_oss(fields: &Fields) -> Result<DecoderConfig> {
    let defaults = Defaults { head_dim: Some(64), rms_norm_eps: Some(1e-5), ..GIVEN };
    let mut config = base_with_theta(fields, &defaults, 150_000.)?;
    if !fields.is_given("rope_scaling") && !fields.is_given("rope_parameters") {
        // The class of transformers has this scaling by default.
        return Err(missing("rope_scaling"));
    }
    config.sinks = true;
    let bias = fields.flag("attention_bias")?.unwrap_or(true);
    config.biases = Biases { qkv: bias, output: bias, mlp: false };
    let window = window_or(fields, Some(128))?;
    set_windows(fields, &mut config, window, |layer| layer.is_multiple_of(2))?;
    let alpha = real_or(fields, "swiglu_alpha", 1.702)?;
    let limit = real_or(fields, "swiglu_limit", 7.)?;
    let names = ExpertNames::Stacked(Clamp { alpha, limit });
    set_experts(fields, &mut config, Routing::SoftmaxChosen, names)?;
    Ok(config)
}

/// Windows begin at layer `max_window_layers`.
fn set_qwen_windows(fields: &Fields, config: &mut DecoderConfig) -> Result<()> {
    let window = used_window(fields)?;
    let first = fields.size("max_window_layers")?;
    if window.is_some() && first.is_none() && !fields.is_given("layer_types") {
        return Err(missing("max_window_layers"));
    }
    if window.is_none() {
        return reject_windows(fields, config);
    }
    set_windows(fields, config, window, |layer| first.is_some_and(|first| layer >= first))
}

fn mistral(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &GIVEN)?;
    // The first Mistral.
    let window = window_or(fields, Some(4096))?;
    set_windows(fields, &mut config, window, |_| true)?;
    Ok(config)
}

fn ministral(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &GIVEN)?;
    let window = window_or(fields, None)?;
    set_windows(fields, &mut config, window, |_| true)?;
    Ok(config)
}

fn ministral3(fields: &Fields) -> Result<DecoderConfig> {
    let defaults = Defaults { head_dim: Some(128), ..GIVEN };
    let mut config = base_without_ropes(fields, &defaults)?;
    let (rope, query_scale) = rope_reader(fields, &defaults, &config).read_with_query_scale()?;
    config.ropes = vec![rope];
    config.query_scale = Some(query_scale);
    let window = window_or(fields, None)?;
    set_windows(fields, &mut config, window, |_| true)?;
    Ok(config)
}

fn smollm3(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &Defaults { tied: true, ..GIVEN })?;
    let attention = fields.flag("attention_bias")?.unwrap_or(false);
    let mlp = fields.flag("mlp_bias")?.unwrap_or(false);
    config.biases = Biases { qkv: attention, output: attention, mlp };
    let has_rope = smollm3_ropes(fields, config.layers.len())?;
    for (layer, has_rope) in config.layers.iter_mut().zip(&has_rope) {
        layer.rope = has_rope.then_some(0);
    }
    let window = used_window(fields)?;
    set_windows(fields, &mut config, window, |layer| !has_rope[layer])?;
    Ok(config)
}

/// Returns for each layer whether it has a rope: the field `no_rope_layers` is 1 for a layer with one.
fn smollm3_ropes(fields: &Fields, n_layers: usize) -> Result<Vec<bool>> {
    let field = "no_rope_layers";
    if let Some(flags) = fields.list::<u8>(field, "a list of 0 and 1")? {
        if flags.len() != n_layers {
            let found = format!("{} numbers", flags.len());
            return Err(field_error(field, &found, format!("{n_layers}, one for each layer")));
        }
        return Ok(flags.into_iter().map(|flag| flag != 0).collect());
    }
    let interval = period(fields, "no_rope_layer_interval", 4)?;
    Ok((1..=n_layers).map(|number| !number.is_multiple_of(interval)).collect())
}

/// The defaults of all Gemmas.
const GEMMA: Defaults = Defaults {
    head_dim: Some(256),
    rms_norm_eps: Some(1e-6),
    tied: true,
    activation: Activation::GeluTanh,
    ..GIVEN
};

fn gemma(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &GEMMA)?;
    set_gemma(&mut config);
    reject_bias(fields)?;
    reject_windows(fields, &config)?;
    Ok(config)
}

/// Sets the common properties of all Gemmas.
fn set_gemma(config: &mut DecoderConfig) {
    config.norm_offset = 1.;
    config.embedding_scale = (config.hidden_size as f64).sqrt();
}

fn reject_bias(fields: &Fields) -> Result<()> {
    if fields.flag("attention_bias")?.unwrap_or(false) {
        let expected = "false in this architecture".into();
        return Err(field_error("attention_bias", &true, expected));
    }
    Ok(())
}

fn gemma2(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &GEMMA)?;
    set_gemma(&mut config);
    reject_bias(fields)?;
    config.norms = BlockNorms::Gemma;
    config.attention_scale = real_or(fields, "query_pre_attn_scalar", 256.)?.powf(-0.5);
    config.attention_softcap = softcap(fields, "attn_logit_softcapping", Some(50.))?;
    config.logit_softcap = softcap(fields, "final_logit_softcapping", Some(30.))?;
    let window = window_or(fields, Some(4096))?;
    set_windows(fields, &mut config, window, |layer| layer.is_multiple_of(2))?;
    Ok(config)
}

/// Returns a cap; null is none.
fn softcap(fields: &Fields, field: &'static str, default: Option<f64>) -> Result<Option<f64>> {
    let default = default.filter(|_| !fields.is_null(field));
    Ok(fields.real(field)?.or(default))
}

fn gemma3(fields: &Fields) -> Result<DecoderConfig> {
    // Files of models that also see images leave these out.
    let fields = &fields.with_defaults(&[
        ("vocab_size", 262_208),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("max_position_embeddings", 131_072),
    ]);
    let mut config = base_without_ropes(fields, &GEMMA)?;
    set_gemma(&mut config);
    reject_bias(fields)?;
    config.norms = BlockNorms::Gemma;
    config.qk_norm = Some(QkNorm::PerHead);
    config.attention_scale = real_or(fields, "query_pre_attn_scalar", 256.)?.powf(-0.5);
    if let Some(cap) = fields.real("attn_logit_softcapping")? {
        // transformers reads the field and does not apply it.
        let expected = "null in this architecture".into();
        return Err(field_error("attn_logit_softcapping", &cap, expected));
    }
    config.logit_softcap = softcap(fields, "final_logit_softcapping", None)?;
    let pattern = period(fields, "sliding_window_pattern", 6)?;
    let window = window_or(fields, Some(4096))?;
    set_windows(fields, &mut config, window, |layer| !(layer + 1).is_multiple_of(pattern))?;
    let local = fields.real("rope_local_base_freq")?.unwrap_or(1e4);
    set_ropes_by_kind(fields, &GEMMA, &mut config, [1e6, local])?;
    Ok(config)
}

/// Gives layers with a window a separate rope, without scaling. The bases of full layers and of
/// layers with a window are those of the file, or `thetas`.
fn set_ropes_by_kind(
    fields: &Fields,
    defaults: &Defaults,
    config: &mut DecoderConfig,
    [full_theta, window_theta]: [f64; 2],
) -> Result<()> {
    let reader = rope_reader(fields, defaults, config);
    let full = reader.read_kind("full_attention", full_theta)?;
    let window = reader.read_kind("sliding_attention", window_theta)?;
    config.ropes = if let (Some(full), Some(window)) = (full, window) {
        vec![full, window]
    } else {
        let full = reader.read(full_theta)?;
        let scaling = RopeScaling::Default;
        let window = RopeConfig { theta: window_theta, scaling, ..full.clone() };
        vec![full, window]
    };
    for layer in &mut config.layers {
        layer.rope = Some(usize::from(layer.window.is_some()));
    }
    Ok(())
}

fn phi3(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &Defaults { rms_norm_eps: Some(1e-5), ..GIVEN })?;
    (config.fused_qkv, config.fused_gate_up) = (true, true);
    let window = window_or(fields, None)?;
    set_windows(fields, &mut config, window, |_| true)?;
    Ok(config)
}

fn olmo2(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &Defaults { rms_norm_eps: Some(1e-5), ..GIVEN })?;
    set_olmo(fields, &mut config)?;
    reject_windows(fields, &config)?;
    Ok(config)
}

fn set_olmo(fields: &Fields, config: &mut DecoderConfig) -> Result<()> {
    config.norms = BlockNorms::After;
    config.qk_norm = Some(QkNorm::AllHeads);
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    config.biases = Biases { qkv: bias, output: bias, mlp: false };
    Ok(())
}

fn olmo3(fields: &Fields) -> Result<DecoderConfig> {
    /// The base of all published models. With another one, layers with a window have it in transformers 4
    /// and this one in transformers 5.
    const OLMO_THETA: f64 = 5e5;
    let defaults = Defaults { rms_norm_eps: Some(1e-5), ..GIVEN };
    let mut config = base_without_ropes(fields, &defaults)?;
    set_olmo(fields, &mut config)?;
    if let Some(theta) =
        fields.real("rope_theta")?.filter(|theta| theta.to_bits() != OLMO_THETA.to_bits())
    {
        let expected = format!("{OLMO_THETA}, or given for each kind of layer in rope_parameters");
        return Err(field_error("rope_theta", &theta, expected));
    }
    let window = window_or(fields, Some(4096))?;
    set_windows(fields, &mut config, window, |layer| !(layer + 1).is_multiple_of(4))?;
    set_ropes_by_kind(fields, &defaults, &mut config, [OLMO_THETA; 2])?;
    Ok(config)
}

fn granite(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &GIVEN)?;
    let attention = fields.flag("attention_bias")?.unwrap_or(false);
    let mlp = fields.flag("mlp_bias")?.unwrap_or(false);
    config.biases = Biases { qkv: attention, output: attention, mlp };
    // Not 1 / sqrt(head size) by default.
    config.attention_scale = real_or(fields, "attention_multiplier", 1.)?;
    config.embedding_scale = real_or(fields, "embedding_multiplier", 1.)?;
    config.residual_scale = real_or(fields, "residual_multiplier", 1.)?;
    config.logit_scale = 1. / real_or(fields, "logits_scaling", 1.)?;
    reject_windows(fields, &config)?;
    Ok(config)
}

fn glm(fields: &Fields) -> Result<DecoderConfig> {
    let defaults = Defaults {
        head_dim: Some(128),
        rms_norm_eps: Some(1.5625e-7),
        pairs: RopePairs::Neighbors,
        rotated: 0.5,
        ..GIVEN
    };
    let mut config = base(fields, &defaults)?;
    config.fused_gate_up = true;
    config.biases.qkv = fields.flag("attention_bias")?.unwrap_or(true);
    reject_windows(fields, &config)?;
    Ok(config)
}

fn glm4(fields: &Fields) -> Result<DecoderConfig> {
    Ok(DecoderConfig { norms: BlockNorms::Glm, ..glm(fields)? })
}

fn seed_oss(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &Defaults { head_dim: Some(128), ..GIVEN })?;
    // A missing rate is 0.1 in transformers, unlike in other families.
    for field in ["attention_dropout", "residual_dropout"] {
        if !fields.is_given(field) {
            return Err(missing(field));
        }
    }
    config.biases = Biases {
        qkv: fields.flag("attention_bias")?.unwrap_or(true),
        output: fields.flag("attention_out_bias")?.unwrap_or(false),
        mlp: fields.flag("mlp_bias")?.unwrap_or(false),
    };
    reject_windows(fields, &config)?;
    Ok(config)
}

fn ernie4_5(fields: &Fields) -> Result<DecoderConfig> {
    let defaults = Defaults {
        head_dim: Some(128),
        rms_norm_eps: Some(1e-5),
        tied: true,
        pairs: RopePairs::Neighbors,
        ..GIVEN
    };
    let mut config = base(fields, &defaults)?;
    let bias = fields.flag("use_bias")?.unwrap_or(false);
    config.biases = Biases { qkv: bias, output: bias, mlp: bias };
    reject_windows(fields, &config)?;
    Ok(config)
}

fn exaone4(fields: &Fields) -> Result<DecoderConfig> {
    let mut config = base(fields, &Defaults { rms_norm_eps: Some(1e-5), ..GIVEN })?;
    config.norms = BlockNorms::After;
    config.qk_norm = Some(QkNorm::PerHead);
    let window = window_or(fields, Some(4096))?;
    let pattern = fields.value("sliding_window_pattern");
    let is_known = pattern.is_null() || pattern == "LLLG" || pattern == 4;
    if window.is_some() && !is_known && !fields.is_given("layer_types") {
        return Err(field_error("sliding_window_pattern", pattern, "LLLG or 4".into()));
    }
    set_windows(fields, &mut config, window, |layer| !(layer + 1).is_multiple_of(4))?;
    if window.is_some() {
        // Then full layers have no positions.
        for layer in config.layers.iter_mut().filter(|layer| layer.window.is_none()) {
            layer.rope = None;
        }
    }
    Ok(config)
}
