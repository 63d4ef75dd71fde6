//! [`Checkpoint`]: crate::Checkpoint
//! [`Checkpoints`]: crate::Checkpoints
//! [`StateDict`]: crate::StateDict
//! [`StoredWeights`]: crate::StoredWeights
//! [`TensorFile`]: crate::TensorFile
//! [`TensorKey`]: crate::TensorKey
//! [`files`]: crate::files
// The README links to the registry. If a link is defined twice, the first definition counts, so on
// this page the definitions above lead to the crate itself.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod disk;
mod dtype;
mod error;
mod folder;
mod run;
mod safetensors;
#[doc(hidden)]
pub mod support;

/// Files and folders that appear under their names atomically.
pub use core_types::files;

#[cfg(any(test, fuzzing))]
pub use crate::run::fuzzing;
pub use crate::{
    error::{Error, Result, parameter::ParameterError, skipped::SkippedCheckpoint},
    folder::weights::StoredWeights,
    run::{Checkpoints, checkpoint::Checkpoint, key::TensorKey, state_dict::StateDict},
    safetensors::tensor_file::{TensorFile, TensorInfo},
};
