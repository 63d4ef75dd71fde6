#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod axes;
mod error;
mod mesh;
mod pmap;
mod replica;
mod shard;
mod tree;
mod worker;

pub use crate::{
    axes::{Axes, InAxis, OutAxis},
    error::{Error, Result},
    mesh::DeviceMesh,
    pmap::PMap,
    replica::Replica,
    tree::TensorTree,
};
