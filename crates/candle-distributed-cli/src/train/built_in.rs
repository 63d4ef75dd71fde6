//! The model of this program, which it trains where there is no other: a small Llama over bytes.

use candle_distributed::finetune::models::LlamaConfig;
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
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
pub(crate) fn config(sizes: &Sizes, context: Option<usize>) -> Result<Value> {
    let built_in = LlamaConfig::from_json(CONFIG).expect("it is the configuration of a Llama");
    check_heads(&built_in, sizes)?;
    let mut config: Value = serde_json::from_str(CONFIG).expect("a configuration is JSON");
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
fn check_heads(built_in: &LlamaConfig, sizes: &Sizes) -> Result<()> {
    let hidden = sizes.hidden.unwrap_or(built_in.hidden_size);
    let heads = sizes.n_heads.unwrap_or(built_in.num_attention_heads);
    if heads > 0 && hidden.is_multiple_of(heads) {
        return Ok(());
    }
    let uneven = format!("--hidden {hidden} does not split evenly over --n-heads {heads}");
    Err(Error::usage(uneven))
}

#[cfg(test)]
pub(crate) mod tests {
    use candle_distributed::finetune::{
        Folder, Overlong,
        data::Rows,
        spec::{Recipe, RunInputs, Session, Spec},
    };

    use super::*;

    /// Returns the inputs of a run of this model.
    pub(crate) fn inputs() -> RunInputs {
        let config = config(&Sizes::default(), None).unwrap();
        let folder = Folder::from_config(config.to_string()).unwrap();
        RunInputs {
            folder: None,
            config,
            weights: None,
            init: Some(7),
            tokenizer: folder.tokenizer().fingerprint(),
            context: 128,
            rows: Rows::Padded,
            overlong: Overlong::Split,
            batch_size: None,
            validation: None,
            merge: true,
        }
    }

    /// Returns a run of 20 steps.
    pub(crate) fn spec() -> Spec {
        let session = Session {
            first_step: 0,
            world_size: 2,
            devices_here: 2,
            on_processors: true,
            sharding: None,
            base_bytes: None,
            step_traffic: None,
            peak_bytes: None,
        };
        let spec = Spec {
            format_version: 1,
            seed: 7,
            steps: 20,
            data: None,
            text: String::new(),
            max_tokens: 4096,
            allow_non_finite: false,
            finetune: inputs(),
            recipe: Recipe::default(),
            sessions: vec![session],
            identity: String::new(),
            model_files: vec![],
            model_fingerprint: None,
        };
        spec.sealed()
    }

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
