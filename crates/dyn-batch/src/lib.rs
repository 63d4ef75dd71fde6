//! [`Batch`]: crate::Batch
//! [`BatchConfig`]: crate::BatchConfig
//! [`BatchPlan`]: crate::BatchPlan
//! [`BatchState`]: crate::BatchState
//! [`Batches`]: crate::Batches
//! [`Cost`]: crate::Cost
//! [`DistributedBatchSampler`]: crate::DistributedBatchSampler
//! [`DynamicBatchSampler`]: crate::DynamicBatchSampler
//! [`Overlong`]: crate::Overlong
//! [`PaddingReport`]: crate::PaddingReport
//! [`Remainder`]: crate::Remainder
//! [`Segments`]: crate::Segments
//! [`Sequence`]: crate::Sequence
//! [`SequenceLengths`]: crate::SequenceLengths
//! [`ShapeReport`]: crate::ShapeReport
//! [`Steps`]: crate::Steps
//! [`balance`]: crate::balance()
#![cfg_attr(feature = "candle", doc = "[`Collator`]: crate::Collator")]
// The README's links go to the registry. The first of two definitions counts: on this page, where
// those above come first, they go to the crate itself.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod assembly;
mod batch;
mod batches;
#[cfg(feature = "candle")]
mod collate;
mod config;
mod distributed;
mod error;
mod lengths;
mod limits;
mod pack;
mod plan;
mod report;
mod sampler;
mod shuffle;
mod sort;

#[cfg(feature = "candle")]
pub use crate::collate::{Collator, PackedTensors, PaddedTensors, PaddingSide};
pub use crate::{
    batch::{Batch, Sequence},
    batches::Batches,
    config::{BatchConfig, Buckets, Cost, Cut, DynamicBatchStrategy, Overlong, Packing, Remainder},
    distributed::{
        BatchState, DistributedBatchSampler, DistributedConfig, Step, StepLayout, StepRemainder,
        Steps, balance,
    },
    error::{Error, Result},
    lengths::SequenceLengths,
    pack::Segments,
    plan::BatchPlan,
    report::{LengthBin, PaddingReport, ShapeCount, ShapeReport},
    sampler::{DynamicBatchSampler, Measured},
};
