//! Supported and unsupported settings of a `config.json`.

use candle_core::DType;
use finetune::models::{Biases, Decoder, DecoderConfig, RopeScaling};
use serde_json::{Value, json};

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
    let model = DecoderConfig::from_json(&changed(fields)).and_then(Decoder::from_config);
    model.unwrap_err().to_string()
}

#[test]
fn defaults_match_transformers() {
    let config = DecoderConfig::from_json(&changed(&[])).unwrap();
    assert_eq!(config.head_dim, 4);
    assert_eq!((config.dtype, config.tie_word_embeddings), (DType::F32, false));
    assert_eq!((config.layers[0].window, config.biases), (None, Biases::default()));
    let llama2 = [
        ("rope_scaling", json!({"type": "linear", "factor": 2})),
        ("num_key_value_heads", Value::Null),
        ("torch_dtype", json!("bfloat16")),
    ];
    let config = DecoderConfig::from_json(&changed(&llama2)).unwrap();
    assert_eq!(config.ropes[0].scaling, RopeScaling::Linear { factor: 2. });
    assert_eq!((config.num_key_value_heads, config.dtype), (4, DType::BF16));
}

#[test]
fn windows_depend_on_the_architecture() {
    let windows = |architecture: &str, fields: &[(&str, Value)]| {
        let architecture = [("architectures", json!([architecture]))];
        let config = DecoderConfig::from_json(&changed(&[&architecture[..], fields].concat()));
        let windows = |config: DecoderConfig| [0, 1].map(|layer| config.layers[layer].window);
        config.map(windows).map_err(|error| error.to_string())
    };
    let given = |window: Value| ("sliding_window", window);
    let used = |used: bool| ("use_sliding_window", json!(used));
    let missing =
        |field: &str| format!("{field} is missing, it must be given in this architecture");
    let types = |name| ("layer_types", json!([name, "full_attention"]));
    let rejected =
        "layer_types is sliding_attention, it must be full_attention in this architecture";
    let llama = "LlamaForCausalLM";
    assert_eq!(windows(llama, &[given(json!(8))]), Ok([None; 2]));
    assert_eq!(windows(llama, &[given(json!(8)), types("full_attention")]), Ok([None; 2]));
    assert_eq!(
        windows(llama, &[given(json!(8)), types("sliding_attention")]),
        Err(rejected.into())
    );
    let qwen = "Qwen2ForCausalLM";
    let first = ("max_window_layers", json!(1));
    assert_eq!(windows(qwen, &[given(json!(8))]), Ok([None; 2]));
    assert_eq!(windows(qwen, &[given(json!(8)), used(false)]), Ok([None; 2]));
    assert_eq!(windows(qwen, &[given(json!(8)), used(true), first.clone()]), Ok([None, Some(8)]));
    assert_eq!(windows(qwen, &[given(json!(8)), used(true)]), Err(missing("max_window_layers")));
    assert_eq!(windows(qwen, &[used(true), first]), Err(missing("sliding_window")));
    let is_contradicted = windows(qwen, &[given(json!(8)), types("sliding_attention")]);
    assert_eq!(is_contradicted, Err(rejected.into()));
    let mistral = "MistralForCausalLM";
    assert_eq!(windows(mistral, &[given(json!(8)), used(false)]), Ok([Some(8); 2]));
    assert_eq!(windows(mistral, &[given(Value::Null)]), Ok([None; 2]));
    assert_eq!(windows(mistral, &[]), Ok([Some(4096); 2]));
}

#[test]
fn unsupported_settings_are_rejected_by_name() {
    for (field, value, expected) in [
        (
            "architectures",
            json!(["Qwen3NextForCausalLM"]),
            r#"architectures is ["Qwen3NextForCausalLM"] (gated delta nets), it must be one of Llama"#,
        ),
        ("hidden_act", json!("gelu"), "hidden_act is gelu, it must be silu"),
        ("attention_dropout", json!(0.1), "attention_dropout is 0.1, it must be 0"),
        ("partial_rotary_factor", json!(1.5), "partial_rotary_factor is 1.5, it must be above 0"),
        ("partial_rotary_factor", json!(0.9), "the rotated width is 3, it must be even"),
        (
            "rope_scaling",
            json!({"type": "dynamic", "factor": 2.0}),
            "rope_scaling.type is dynamic, it must be default, linear, llama3, yarn or longrope",
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
    let other = DecoderConfig::from_json(r#"{"architectures": ["GPT2LMHeadModel"], "n_embd": 8}"#);
    assert!(other.unwrap_err().to_string().starts_with("architectures is"));
    let missing =
        DecoderConfig::from_json(r#"{"architectures": ["LlamaForCausalLM"]}"#).unwrap_err();
    assert!(missing.to_string().contains("num_attention_heads is missing"), "{missing}");
}

/// Settings that would silently describe another model, or none.
#[test]
fn families_reject_their_own_settings() {
    let window = ("sliding_window", json!(8));
    let experts = [
        ("head_dim", json!(4)),
        ("num_experts", json!(4)),
        ("num_experts_per_tok", json!(2)),
        ("moe_intermediate_size", json!(8)),
    ];
    let gpt_oss = [
        ("num_local_experts", json!(4)),
        ("num_experts_per_tok", json!(5)),
        ("rope_scaling", json!({"rope_type": "default"})),
    ];
    for (family, fields, field, value, expected) in [
        ("Exaone4", &[window][..], "sliding_window_pattern", json!("LG"), "LLLG or 4"),
        ("Qwen3Moe", &experts, "decoder_sparse_step", json!(0), "at least 1"),
        ("Qwen3Moe", &experts, "num_experts_per_tok", json!(5), "1 to 4"),
        ("GptOss", &gpt_oss, "num_experts_per_tok", json!(5), "1 to 4"),
        ("SmolLM3", &[], "no_rope_layer_interval", json!(0), "at least 1"),
        ("Mistral", &[], "sliding_window", json!(0), "at least 1"),
        ("SeedOss", &[], "residual_dropout", json!(0.1), "0: dropout is not supported"),
    ] {
        let architecture = [("architectures", json!([format!("{family}ForCausalLM")]))];
        let found = rejection(&[&architecture, fields, &[(field, value)]].concat());
        assert!(found.starts_with(field) && found.contains(expected), "{family}: {found}");
    }
    let mut config = DecoderConfig::from_json(&changed(&[])).unwrap();
    config.layers[1].rope = Some(1);
    let found = Decoder::from_config(config).unwrap_err().to_string();
    assert!(found.contains("the rope of a layer is 1, it must be below 1"), "{found}");
}
