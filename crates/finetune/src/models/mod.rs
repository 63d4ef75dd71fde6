//! Models of Hugging Face folders, in units.
//!
//! One [`Decoder`] serves all families: [`DecoderConfig`] describes the sizes and formulas of a folder's
//! `config.json`, and the variables have the names of the folder's weights. [`DataParallel`](dist_train::DataParallel) and
//! [`FullyShard`](dist_train::FullyShard) train it with the same loss function.
//!
//! # Examples
//!
//! A model with random weights. `.weights("folder")` instead of `.init(…)` loads the weights of a
//! folder:
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use candle_nn::{Optimizer, ParamsAdamW};
//! use core_types::Seed;
//! use dist_train::{AdamW, DataParallel, Units};
//! use finetune::models::{Decoder, DecoderConfig, Tokens};
//! use pmap_mesh::{DeviceMesh, Replica};
//!
//! let config = r#"{
//!     "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12,
//!     "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32,
//!     "rms_norm_eps": 1e-6, "rope_theta": 10000.0
//! }"#;
//! let decoder = Decoder::from_config(DecoderConfig::from_json(config)?)?;
//! let mesh = DeviceMesh::cpu(2)?;
//! let builder = DataParallel::builder(&mesh, |vb| decoder.declare(&vb)).by_units(decoder.units());
//! let mut model = builder
//!     .init(Seed::new(1))
//!     .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?;
//!
//! let ids = Tensor::new(&[[3_u32, 1, 4, 1], [5, 9, 2, 6]], &Device::Cpu)?;
//! let labels = Tensor::new(&[[3_i64, 1, 4, 1], [5, 9, 2, -100]], &Device::Cpu)?;
//! let loss = move |_: &Replica, model: &Units, (ids, labels): (Tensor, Tensor)| {
//!     decoder.loss(model, &Tokens::rows(ids), &labels)
//! };
//! let first = model.step((ids.clone(), labels.clone()), loss.clone())?.loss;
//! assert!(model.step((ids, labels), loss)?.loss < first);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attention;
mod block;
mod cache;
pub(crate) mod cached;
mod config;
mod decoder;
mod error;
mod experts;
mod layers;
mod names;
mod pass;
mod precision;
mod read;
mod rope;
mod scaling;
mod tokens;

pub use self::{
    config::{
        Biases, BlockNorms, Clamp, DecoderConfig, ExpertNames, ExpertsConfig, LayerConfig, QkNorm,
        QueryScale, Routing,
    },
    decoder::Decoder,
    error::ModelError,
    precision::Precision,
    rope::{RopeConfig, RopePairs},
    scaling::RopeScaling,
    tokens::Tokens,
};
