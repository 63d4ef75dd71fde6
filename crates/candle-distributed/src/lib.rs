#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

#[doc(inline)]
pub use core_types as types;
#[cfg(feature = "data")]
#[doc(inline)]
pub use data_loader as data;
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
#[cfg(feature = "finetune")]
#[doc(inline)]
pub use finetune;
#[cfg(feature = "plan")]
#[doc(inline)]
pub use fsdp_plan as plan;
#[cfg(feature = "ops")]
#[doc(inline)]
pub use fused_ops as ops;
#[cfg(feature = "mesh")]
#[doc(inline)]
pub use pmap_mesh as mesh;
