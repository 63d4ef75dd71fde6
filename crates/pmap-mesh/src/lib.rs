#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod axes;
mod error;
mod mesh;
#[cfg(feature = "plan")]
mod placement;
mod pmap;
mod replica;
mod shard;
mod tree;
mod worker;

#[cfg(feature = "plan")]
pub use crate::placement::parameter_infos;
pub use crate::{
    axes::{Axes, InAxis, OutAxis},
    error::{Error, Result},
    mesh::DeviceMesh,
    pmap::PMap,
    replica::Replica,
    tree::TensorTree,
};
