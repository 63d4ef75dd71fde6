//! [`Batch`]: crate::Batch
//! [`BatchConfig`]: crate::BatchConfig
//! [`BatchState`]: crate::BatchState
//! [`Batches`]: crate::Batches
//! [`Cost`]: crate::Cost
//! [`DistributedBatchSampler`]: crate::DistributedBatchSampler
//! [`GridConfig`]: crate::GridConfig
//! [`DynamicBatchSampler`]: crate::DynamicBatchSampler
//! [`Overlong`]: crate::Overlong
//! [`PaddingReport`]: crate::PaddingReport
//! [`Remainder`]: crate::Remainder
//! [`Sequence`]: crate::Sequence
//! [`SequenceLengths`]: crate::SequenceLengths
//! [`Steps`]: crate::Steps
#![cfg_attr(feature = "candle", doc = "[`BatchTensors`]: crate::BatchTensors")]
#![cfg_attr(feature = "candle", doc = "[`Collator`]: crate::Collator")]
#![cfg_attr(feature = "candle", doc = "[`SequenceLayout`]: crate::SequenceLayout")]
// The README links to docs.rs. Of two definitions of a link the first wins, so on this page the
// definitions above replace the README's and point into this crate.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod batch;
mod builder;
#[cfg(feature = "candle")]
mod collate;
mod config;
mod distributed;
mod error;
mod grid;
mod lengths;
mod limits;
mod pack;
mod report;
mod sampler;
mod sort;

#[cfg(feature = "candle")]
pub use crate::collate::{BatchTensors, Collator, PackedRow, PaddedRows, SequenceLayout};
pub use crate::{
    batch::{Batch, Sequence},
    config::{BatchConfig, Buckets, Cost, Cut, DynamicBatchStrategy, Overlong, Packing, Remainder},
    distributed::{
        BatchState, DistributedBatchSampler, DistributedConfig, Step, StepLayout, StepRemainder,
        Steps,
    },
    error::{Error, Result},
    grid::{GridConfig, GridReport, Synchronization},
    lengths::{
        SequenceLengths,
        split::{DocumentPiece, SplitLengths},
    },
    report::PaddingReport,
    sampler::{DynamicBatchSampler, batches::Batches},
};

/// Items shared with the padding tables of this workspace. They may change in any version.
#[doc(hidden)]
pub mod support {
    pub use crate::grid::balance::balance;
}
