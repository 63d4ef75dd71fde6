//! [`DistributedSampler`]: crate::DistributedSampler
//! [`MixtureEnd`]: crate::MixtureEnd
//! [`MixturePart`]: crate::MixturePart
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
mod order;
mod partition;
mod reshard;
mod sampler;
mod split;
mod state;

pub use crate::{
    config::{Order, Partition, SamplerConfig, Tail},
    error::{Error, Result},
    order::{MixtureEnd, MixturePart, Quota},
    sampler::{DistributedSampler, indices::Indices},
    state::SamplerState,
};
