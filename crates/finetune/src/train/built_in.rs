//! The built-in model of a run without `--model`: a small byte-level Llama.

use serde_json::{Value, json};

use crate::{
    error::{Result, spec::SpecError},
    models::DecoderConfig,
    train::options::RunOptions,
};

/// The `config.json` of the model. Its tokens are the 256 bytes, and a token that ends a text.
const CONFIG: &str = include_str!("built_in.json");

/// Returns the `config.json` of the model, with the sizes that the options of a run set.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
pub(super) fn config(options: &RunOptions) -> Result<Value> {
    let built_in = DecoderConfig::from_json(CONFIG).expect("it is the configuration of a Llama");
    check_heads(&built_in, options)?;
    let mut config: Value = serde_json::from_str(CONFIG).expect("a configuration is JSON");
    for (field, size) in [
        ("num_hidden_layers", options.n_layers),
        ("hidden_size", options.hidden),
        ("intermediate_size", options.hidden.map(feed_forward)),
        ("num_attention_heads", options.n_heads),
        ("num_key_value_heads", options.n_heads),
        ("max_position_embeddings", options.context),
    ] {
        if let Some(size) = size {
            config[field] = json!(size);
        }
    }
    DecoderConfig::from_json(&config.to_string()).map_err(SpecError::Model)?;
    Ok(config)
}

/// Returns the width of the feed-forward network. Its three matrices have about as many weights as two
/// matrices of the usual width, four times the hidden width.
const fn feed_forward(hidden: usize) -> usize {
    hidden.saturating_mul(11) / 4
}

/// Rejects a number of heads that does not divide the hidden width.
fn check_heads(built_in: &DecoderConfig, options: &RunOptions) -> Result<()> {
    let hidden = options.hidden.unwrap_or(built_in.hidden_size);
    let n_heads = options.n_heads.unwrap_or(built_in.num_attention_heads);
    if n_heads > 0 && hidden.is_multiple_of(n_heads) {
        return Ok(());
    }
    Err(SpecError::setting("n_heads", &n_heads, format!("a divisor of hidden {hidden}")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_set_the_sizes() {
        let options = RunOptions {
            n_layers: Some(3),
            hidden: Some(24),
            n_heads: Some(2),
            context: Some(16),
            ..RunOptions::default()
        };
        let config = config(&options).unwrap();
        let llama = DecoderConfig::from_json(&config.to_string()).unwrap();
        assert_eq!((llama.layers.len(), llama.hidden_size), (3, 24));
        assert_eq!((llama.num_attention_heads, llama.num_key_value_heads), (2, 2));
        assert_eq!((llama.max_position_embeddings, llama.intermediate_size), (16, 66));
    }
}
