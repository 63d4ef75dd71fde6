//! [`DeviceMesh`]: crate::DeviceMesh
//! [`Error`]: crate::Error
//! [`P`]: crate::P
//! [`PMap`]: crate::PMap
//! [`Replica`]: crate::Replica
//! [`Sharded`]: crate::Sharded
//! [`TensorTree`]: crate::TensorTree
// The README links to the registry. If a link is defined twice, the first definition counts, so on
// this page the definitions above lead to the crate itself.
#![doc = include_str!("../README.md")]

mod axes;
mod device;
mod engine;
mod error;
mod exit;
mod grid;
mod mesh;
mod pmap;
mod reduce;
mod replica;
mod spec;
mod sync;

pub use crate::{
    axes::{ALL, MeshAxes},
    device::{allocator::keep_freed_memory, threads::init_threads},
    error::{CollectiveError, Error, MeshError, ProcessError, ReplicaError, Result, ValueError},
    mesh::{DeviceMesh, builder::DeviceMeshBuilder},
    pmap::{PMap, sharded::Sharded},
    replica::{
        Replica,
        rng::{BatchKey, BatchKeys, ReplicaRng},
    },
    spec::{P, Specs, cut::Uneven, tree::TensorTree},
};

/// Items for the crates that build on this one. They may change with any version.
#[doc(hidden)]
pub mod support {
    pub use crate::{
        device::threads::THREAD_VARIABLES,
        engine::{
            layout::{Run, RunLayout},
            traffic::{Tally, Traffic},
        },
        replica::pending::Pending,
    };
}

#[doc(hidden)]
pub use crate::error::one_line;

/// The tensor type that [`tensor_tree!`] names, since its callers may have renamed candle.
#[doc(hidden)]
pub use candle_core::Tensor as __Tensor;
