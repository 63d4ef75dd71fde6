//! Supported and unsupported settings of a `config.json`.

use candle_core::DType;
use finetune::models::{Llama, LlamaConfig, ModelError, RopeScaling};
use serde_json::{Value, json};

use crate::models::golden::{Golden, MODELS};

/// Builds a `config.json` in the layout of transformers 4, with some fields replaced.
fn changed(fields: &[(&str, Value)]) -> String {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 10000.0, "rope_scaling": null,
    });
    for (field, value) in fields {
        config[*field] = value.clone();
    }
    config.to_string()
}

fn rejection(fields: &[(&str, Value)]) -> String {
    let model = LlamaConfig::from_json(&changed(fields)).and_then(Llama::from_config);
    model.unwrap_err().to_string()
}

#[test]
fn rope_scalings_are_read() {
    let scalings = MODELS.map(|model| Golden::open(model).llama.config().rope_scaling);
    assert_eq!(
        scalings.map(|scaling| matches!(scaling, RopeScaling::Llama3 { .. })),
        [false, true, false, false]
    );
}

#[test]
fn defaults_match_transformers() {
    let config = LlamaConfig::from_json(&changed(&[])).unwrap();
    assert_eq!(config.head_dim, 4);
    assert_eq!((config.dtype, config.tie_word_embeddings), (DType::F32, false));
    assert_eq!((config.sliding_window, config.attention_bias), (None, false));
    let llama2 = json!({"rope_scaling": {"type": "linear", "factor": 2}, "num_key_value_heads": null, "torch_dtype": "bfloat16"});
    let fields: Vec<_> = llama2
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, value)| (name.as_str(), value.clone()))
        .collect();
    let config = LlamaConfig::from_json(&changed(&fields)).unwrap();
    assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 2. });
    assert_eq!((config.num_key_value_heads, config.dtype), (4, DType::BF16));
}

#[test]
fn windows_depend_on_the_architecture() {
    let window = |architecture: &str, fields: &[(&str, Value)]| {
        let architecture = [("architectures", json!([architecture]))];
        let config = LlamaConfig::from_json(&changed(&[&architecture[..], fields].concat()));
        config.map(|config| config.sliding_window).map_err(|error| error.to_string())
    };
    let given = |window: Value| ("sliding_window", window);
    let used = |used: bool| ("use_sliding_window", json!(used));
    let missing = "sliding_window is missing, it must be given in this architecture, null for none";
    let [llama, qwen, mistral] = ["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"];
    assert_eq!(window(llama, &[given(json!(8))]), Ok(None));
    let types = |name| ("layer_types", json!([name, "full_attention"]));
    assert_eq!(window(llama, &[given(json!(8)), types("full_attention")]), Ok(None));
    assert_eq!(window(llama, &[given(json!(8)), types("sliding_attention")]), Ok(Some(8)));
    assert_eq!(window(qwen, &[given(json!(8))]), Ok(None));
    assert_eq!(window(qwen, &[given(json!(8)), used(false)]), Ok(None));
    assert_eq!(window(qwen, &[given(json!(8)), used(true)]), Ok(Some(8)));
    assert_eq!(window(qwen, &[used(true)]), Err(missing.to_owned()));
    assert_eq!(window(mistral, &[given(json!(8)), used(false)]), Ok(Some(8)));
    assert_eq!(window(mistral, &[given(Value::Null)]), Ok(None));
    assert_eq!(window(mistral, &[]), Err(missing.to_owned()));
}

#[test]
fn unsupported_settings_are_rejected_by_name() {
    for (field, value, expected) in [
        (
            "architectures",
            json!(["GemmaForCausalLM"]),
            r#"architectures is ["GemmaForCausalLM"], it must be one of LlamaForCausalLM, Qwen2ForCausalLM, MistralForCausalLM"#,
        ),
        ("hidden_act", json!("gelu"), "hidden_act is gelu, it must be silu"),
        (
            "attention_bias",
            json!(true),
            "attention_bias is true, it must be false in this architecture",
        ),
        ("mlp_bias", json!(true), "mlp_bias is true"),
        ("attention_dropout", json!(0.1), "attention_dropout is 0.1, it must be 0"),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor is 0.5, it must be 1"),
        (
            "rope_scaling",
            json!({"type": "yarn", "factor": 2.0}),
            "rope_scaling.type is yarn, it must be default, linear or llama3",
        ),
        ("rope_scaling", json!({"type": "linear"}), "rope_scaling.factor is missing"),
        ("rope_scaling", json!({"type": "linear", "factor": 0.5}), "rope_scaling.factor is 0.5"),
        (
            "rope_scaling",
            json!({"type": "linear", "rope_type": "llama3", "factor": 2.0}),
            "rope_scaling.rope_type is another value than rope_scaling.type",
        ),
        (
            "rope_parameters",
            json!({"rope_type": "default", "rope_theta": 5e5}),
            "rope_theta is another value than rope_parameters.rope_theta",
        ),
        ("dtype", json!("float64"), "dtype is float64, it must be float32, bfloat16 or float16"),
        ("quantization_config", json!({"bits": 4}), "the weights are quantized"),
        (
            "num_key_value_heads",
            json!(3),
            "num_key_value_heads is 3, it must be a divisor of num_attention_heads 4",
        ),
        (
            "num_attention_heads",
            json!(3),
            "num_attention_heads is 3, it must be a divisor of hidden_size 16",
        ),
        ("head_dim", json!(5), "head_dim is 5, it must be even"),
        ("vocab_size", json!(0), "vocab_size is 0, it must be 1 to 16777216"),
        ("hidden_size", json!(1_u64 << 62), "hidden_size is 4611686018427387904"),
        ("num_hidden_layers", json!(u64::MAX), "num_hidden_layers is 18446744073709551615"),
        (
            "head_dim",
            json!(1 << 24),
            "num_attention_heads is 4, it must be at most 16777216 / head_dim",
        ),
        ("rms_norm_eps", json!(0.0), "rms_norm_eps is 0, it must be a positive number"),
        ("rope_theta", json!(-1.0), "rope_theta is -1, it must be a positive number"),
    ] {
        let found = rejection(&[(field, value)]);
        assert!(found.contains(expected), "{field}: {found}");
    }
    let per_layer = json!({"full_attention": {"rope_theta": 1e6, "rope_type": "default"}});
    assert!(
        rejection(&[("rope_parameters", per_layer)]).contains("unknown field `full_attention`")
    );
    let other = LlamaConfig::from_json(r#"{"architectures": ["GPT2LMHeadModel"], "n_embd": 8}"#);
    assert!(other.unwrap_err().to_string().starts_with("architectures is"));
    let missing = LlamaConfig::from_json(r#"{"architectures": ["LlamaForCausalLM"]}"#).unwrap_err();
    assert!(
        matches!(missing, ModelError::Json(_)) && missing.to_string().contains("missing field")
    );
}

#[test]
fn window_limits_only_used_positions() {
    let text =
        changed(&[("architectures", json!(["MistralForCausalLM"])), ("sliding_window", json!(32))]);
    let mut config = LlamaConfig::from_json(&text).unwrap();
    assert!(matches!(
        Llama::from_config(config.clone()),
        Err(ModelError::Field { field: "sliding_window", .. })
    ));
    config.max_position_embeddings = 32;
    Llama::from_config(config).unwrap();
}
