// The README's links go to the registry. Of two definitions the first one counts: here they go to
// this crate.

//! [`DistributedSampler`]: crate::DistributedSampler
//! [`Mixture`]: crate::Mixture
//! [`Order`]: crate::Order
//! [`Partition`]: crate::Partition
//! [`Quota`]: crate::Quota
//! [`SamplerConfig`]: crate::SamplerConfig
//! [`Tail`]: crate::Tail
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
