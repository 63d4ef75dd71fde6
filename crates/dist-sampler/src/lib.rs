//! [`DistributedSampler`]: crate::DistributedSampler
//! [`Mixture`]: crate::Mixture
//! [`Order`]: crate::Order
//! [`Partition`]: crate::Partition
//! [`Quota`]: crate::Quota
//! [`SamplerConfig`]: crate::SamplerConfig
//! [`Tail`]: crate::Tail
// The README's links go to the registry. The first of two definitions counts: on this page, where
// those above come first, they go to the crate itself.
#![doc = include_str!("../README.md")]

mod config;
mod error;
mod mixture;
mod order;
mod partition;
mod reshard;
mod sampler;
mod state;

pub use crate::{
    config::{Order, Partition, SamplerConfig, Tail},
    error::{Error, Result},
    mixture::Mixture,
    order::Quota,
    sampler::{DistributedSampler, indices::Indices},
    state::SamplerState,
};
