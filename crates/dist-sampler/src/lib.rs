//! [`DistributedSampler`]: crate::DistributedSampler
//! [`Mixture`]: crate::Mixture
//! [`Order`]: crate::Order
//! [`Partition`]: crate::Partition
//! [`Quota`]: crate::Quota
//! [`SamplerConfig`]: crate::SamplerConfig
//! [`Tail`]: crate::Tail
// The README links to docs.rs. The first definition of a link wins, so on this page the links above
// replace the README's and point into this crate.
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
