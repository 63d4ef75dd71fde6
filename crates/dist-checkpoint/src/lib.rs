//! [`Checkpoint`]: crate::Checkpoint
//! [`Checkpoints`]: crate::Checkpoints
//! [`StateDict`]: crate::StateDict
//! [`StoredWeights`]: crate::StoredWeights
//! [`TensorFile`]: crate::TensorFile
//! [`TensorKey`]: crate::TensorKey
//! [`files`]: crate::files
// The README's links go to the registry. The first of two definitions counts: on this page, where
// those above come first, they go to the crate itself.
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

/// Files and folders that appear under their names in one step.
pub use core_types::files;

#[cfg(any(test, fuzzing))]
pub use crate::run::fuzzing;
pub use crate::{
    error::{
        Error, Result, file_part::FilePart, parameter::ParameterError, skipped::SkippedCheckpoint,
    },
    folder::weights::StoredWeights,
    run::{Checkpoints, checkpoint::Checkpoint, key::TensorKey, state_dict::StateDict},
    safetensors::tensor_file::{TensorFile, TensorInfo},
};
