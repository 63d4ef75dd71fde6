//! The model of this program, which it trains where there is no other: a small Llama over bytes.

use candle_distributed::models::LlamaConfig;
use serde_json::{Value, json};

use crate::error::{Error, Result};

/// Sizes that replace those of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args)]
pub(crate) struct Sizes {
    /// Number of blocks [default: 2, or those of the run that is resumed]
    #[arg(long, value_name = "N", help_heading = "The model")]
    pub(crate) n_layers: Option<usize>,
    /// Width of the residual stream [default: 128, or that of the run that is resumed]
    #[arg(long, value_name = "N", help_heading = "The model")]
    pub(crate) hidden: Option<usize>,
    /// Number of attention heads, which divide the width [default: 4, or those of the run that is
    /// resumed]
    #[arg(long, value_name = "N", help_heading = "The model")]
    pub(crate) n_heads: Option<usize>,
}

/// The `config.json` of the model. Bytes are its tokens, with one that ends a text.
const CONFIG: &str = include_str!("built_in.json");

/// Returns the `config.json` of the model with other sizes.
///
/// # Errors
///
/// If there is no such model.
pub(crate) fn config(sizes: &Sizes, context: Option<usize>) -> Result<Value> {
    let mut config: Value = serde_json::from_str(CONFIG)
        .map_err(|fault| Error::usage(format!("the model of this program: {fault}")))?;
    check_heads(&config, sizes)?;
    for (field, size) in [
        ("num_hidden_layers", sizes.n_layers),
        ("hidden_size", sizes.hidden),
        ("intermediate_size", sizes.hidden.map(feed_forward)),
        ("num_attention_heads", sizes.n_heads),
        ("num_key_value_heads", sizes.n_heads),
        ("max_position_embeddings", context),
    ] {
        if let Some(size) = size {
            config[field] = json!(size);
        }
    }
    let llama = LlamaConfig::from_json(&config.to_string());
    llama.map_err(|fault| Error::usage(fault.to_string()))?;
    Ok(config)
}

/// Returns the width of a feed-forward network with three matrices that has about as many weights
/// as one with two of four times the width.
const fn feed_forward(hidden: usize) -> usize {
    hidden.saturating_mul(11) / 4
}

/// Refuses heads that do not divide the width.
fn check_heads(config: &Value, sizes: &Sizes) -> Result<()> {
    let number = |size: Option<usize>, field: &str| {
        size.map_or_else(|| config[field].as_u64().unwrap_or(0), |size| size as u64)
    };
    let hidden = number(sizes.hidden, "hidden_size");
    let heads = number(sizes.n_heads, "num_attention_heads");
    if heads > 0 && hidden % heads == 0 {
        return Ok(());
    }
    let uneven = format!("--hidden {hidden} does not split evenly over --n-heads {heads}");
    Err(Error::usage(uneven))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_that_are_asked_for() {
        let sizes = Sizes { n_layers: Some(3), hidden: Some(24), n_heads: Some(2) };
        let config = config(&sizes, Some(16)).unwrap();
        let llama = LlamaConfig::from_json(&config.to_string()).unwrap();
        assert_eq!((llama.num_hidden_layers, llama.hidden_size), (3, 24));
        assert_eq!((llama.num_attention_heads, llama.num_key_value_heads), (2, 2));
        assert_eq!((llama.max_position_embeddings, llama.intermediate_size), (16, 66));
    }
}
