//! Models of Hugging Face folders, in units: the Llama family.
//!
//! A model reads its sizes from the folder's `config.json`, and its variables have the names of the
//! folder's weights. [`DataParallel`](dist_train::DataParallel) and
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
//! use finetune::models::{Llama, LlamaConfig, Tokens};
//! use pmap_mesh::{DeviceMesh, Replica};
//!
//! let config = r#"{
//!     "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12,
//!     "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32,
//!     "rms_norm_eps": 1e-6, "rope_theta": 10000.0
//! }"#;
//! let llama = Llama::from_config(LlamaConfig::from_json(config)?)?;
//! let mesh = DeviceMesh::cpu(2)?;
//! let builder = DataParallel::builder(&mesh, |vb| llama.declare(&vb)).by_units(llama.units());
//! let mut model = builder
//!     .init(Seed::new(1))
//!     .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?;
//!
//! let ids = Tensor::new(&[[3_u32, 1, 4, 1], [5, 9, 2, 6]], &Device::Cpu)?;
//! let labels = Tensor::new(&[[3_i64, 1, 4, 1], [5, 9, 2, -100]], &Device::Cpu)?;
//! let loss = move |_: &Replica, model: &Units, (ids, labels): (Tensor, Tensor)| {
//!     llama.loss(model, &Tokens::rows(ids), &labels)
//! };
//! let first = model.step((ids.clone(), labels.clone()), loss.clone())?.loss;
//! assert!(model.step((ids, labels), loss)?.loss < first);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
pub(crate) mod decode;
mod error;
mod llama;
mod precision;
mod read;
mod rope;
mod scaling;
mod tokens;

pub use self::{
    config::LlamaConfig, error::ModelError, llama::Llama, precision::Precision,
    scaling::RopeScaling, tokens::Tokens,
};
