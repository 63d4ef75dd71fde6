//! [`types`]: crate::types
#![cfg_attr(feature = "sampler", doc = "[`sampler`]: crate::sampler")]
#![cfg_attr(feature = "batch", doc = "[`batch`]: crate::batch")]
#![cfg_attr(feature = "plan", doc = "[`plan`]: crate::plan")]
#![cfg_attr(feature = "mesh", doc = "[`mesh`]: crate::mesh")]
#![cfg_attr(feature = "checkpoint", doc = "[`checkpoint`]: crate::checkpoint")]
#![cfg_attr(feature = "train", doc = "[`train`]: crate::train")]
#![cfg_attr(feature = "ops", doc = "[`ops`]: crate::ops")]
#![cfg_attr(feature = "models", doc = "[`models`]: crate::models")]
#![cfg_attr(feature = "candle", doc = "[`Collator`]: crate::batch::Collator")]
// The README's links go to the registry. The first of two definitions counts: on this page, where
// those above come first, they go to the crate itself.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

#[doc(inline)]
pub use core_types as types;
#[cfg(feature = "checkpoint")]
#[doc(inline)]
pub use dist_checkpoint as checkpoint;
#[cfg(feature = "sampler")]
#[doc(inline)]
pub use dist_sampler as sampler;
#[cfg(feature = "train")]
#[doc(inline)]
pub use dist_train as train;
#[cfg(feature = "batch")]
#[doc(inline)]
pub use dyn_batch as batch;
#[cfg(feature = "plan")]
#[doc(inline)]
pub use fsdp_plan as plan;
#[cfg(feature = "ops")]
#[doc(inline)]
pub use fused_ops as ops;
#[cfg(feature = "mesh")]
#[doc(inline)]
pub use pmap_mesh as mesh;

#[cfg(feature = "models")]
pub mod models;
