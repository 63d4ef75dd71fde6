#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod batch;
mod batches;
mod config;
mod error;
mod lengths;
mod report;
mod rules;
mod sampler;

pub use crate::{
    batch::{Batch, Sequence},
    batches::Batches,
    config::{BatchConfig, DynamicBatchStrategy, Overlong, Remainder},
    error::{Error, Result},
    lengths::SequenceLengths,
    report::PaddingReport,
    sampler::{DynamicBatchSampler, Measured},
};
