#![doc = include_str!("../README.md")]

mod config;
mod error;
mod partition;
mod permutation;
mod sampler;

pub use crate::{
    config::{Order, Partition, SamplerConfig, Tail},
    error::{Error, Result},
    sampler::{DistributedSampler, Indices},
};
