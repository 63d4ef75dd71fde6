#![doc = include_str!("../README.md")]

mod config;
mod error;
mod indices;
mod mixture;
mod order;
mod partition;
mod sampler;
mod state;

pub use crate::{
    config::{Order, Partition, SamplerConfig, Tail},
    error::{Error, Result},
    indices::Indices,
    mixture::Mixture,
    order::Quota,
    sampler::DistributedSampler,
    state::SamplerState,
};
