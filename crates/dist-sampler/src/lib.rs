#![doc = include_str!("../README.md")]

mod config;
mod error;
mod mixture;
mod order;
mod partition;
mod sampler;
mod state;
mod unread;

pub use crate::{
    config::{Order, Partition, SamplerConfig, Tail},
    error::{Error, Result},
    mixture::Mixture,
    order::Quota,
    sampler::{DistributedSampler, indices::Indices},
    state::SamplerState,
};
