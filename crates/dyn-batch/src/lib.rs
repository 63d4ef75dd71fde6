//! [`Batch`]: crate::Batch
//! [`BatchConfig`]: crate::BatchConfig
//! [`BatchState`]: crate::BatchState
//! [`Batches`]: crate::Batches
//! [`Cost`]: crate::Cost
//! [`DistributedBatchSampler`]: crate::DistributedBatchSampler
//! [`DynamicBatchSampler`]: crate::DynamicBatchSampler
//! [`Overlong`]: crate::Overlong
//! [`PaddingReport`]: crate::PaddingReport
//! [`Remainder`]: crate::Remainder
//! [`Sequence`]: crate::Sequence
//! [`SequenceLengths`]: crate::SequenceLengths
//! [`Steps`]: crate::Steps
#![cfg_attr(feature = "candle", doc = "[`BatchTensors`]: crate::BatchTensors")]
#![cfg_attr(feature = "candle", doc = "[`Collator`]: crate::Collator")]
// The README's links go to the registry. The first of two definitions counts: on this page, where
// those above come first, they go to the crate itself.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod batch;
mod builder;
#[cfg(feature = "candle")]
mod collate;
mod config;
mod distributed;
mod error;
mod lengths;
mod limits;
mod pack;
mod report;
mod sampler;
mod sort;

#[cfg(feature = "candle")]
pub use crate::collate::{BatchTensors, Collator, PackedRow, PaddedRows};
pub use crate::{
    batch::{Batch, Sequence},
    config::{BatchConfig, Buckets, Cost, Cut, DynamicBatchStrategy, Overlong, Packing, Remainder},
    distributed::{
        BatchState, DistributedBatchSampler, DistributedConfig, Step, StepLayout, StepRemainder,
        Steps,
    },
    error::{Error, Result},
    lengths::SequenceLengths,
    report::PaddingReport,
    sampler::{DynamicBatchSampler, batches::Batches},
};

/// What the tables of padding share with the batcher; it may change with any version.
#[doc(hidden)]
pub mod support {
    pub use crate::distributed::balance::balance;
}
