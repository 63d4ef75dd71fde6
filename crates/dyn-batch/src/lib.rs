#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod arrange;
mod assembly;
mod balance;
mod batch;
mod batches;
mod buckets;
#[cfg(feature = "candle")]
mod collate;
mod config;
mod cost;
mod cut;
mod distributed;
mod error;
mod even;
mod histogram;
mod lengths;
mod limits;
mod minima;
mod pack;
mod plan;
mod report;
mod sampler;
mod shapes;
mod shuffle;
mod steps;
mod window;

#[cfg(feature = "candle")]
pub use crate::collate::{Collator, PackedTensors, PaddedTensors, PaddingSide};
pub use crate::{
    balance::balance,
    batch::{Batch, Sequence},
    batches::Batches,
    buckets::Buckets,
    config::{BatchConfig, Cut, DynamicBatchStrategy, Overlong, Packing, Remainder},
    cost::Cost,
    distributed::{DistributedBatchSampler, DistributedConfig, StepLayout, StepRemainder},
    error::{Error, Result},
    lengths::SequenceLengths,
    pack::Segments,
    plan::BatchPlan,
    report::PaddingReport,
    sampler::{DynamicBatchSampler, Measured},
    shapes::{LengthBin, ShapeCount, ShapeReport},
    steps::{BatchState, Step, Steps},
};
