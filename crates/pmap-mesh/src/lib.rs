//! [`DeviceMesh`]: crate::DeviceMesh
//! [`Error`]: crate::Error
//! [`P`]: crate::P
//! [`PMap`]: crate::PMap
//! [`Replica`]: crate::Replica
//! [`Sharded`]: crate::Sharded
//! [`TensorTree`]: crate::TensorTree
// The README's links go to the registry. The first of two definitions counts: on this page, where
// those above come first, they go to the crate itself.
#![doc = include_str!("../README.md")]

mod axes;
mod device;
mod ending;
mod engine;
mod error;
mod grid;
mod mesh;
mod pmap;
mod reduce;
mod replica;
mod spec;
mod sync;

#[cfg(feature = "nccl")]
pub use crate::engine::nccl::NcclStore;
pub use crate::{
    axes::{ALL, MeshAxes},
    device::threads::init_threads,
    error::{
        CollectiveError, Error, MeshError, ProcessError, ReplicaError, Result, ValueError,
        fault::{Side, SpecFault},
    },
    mesh::{DeviceMesh, builder::DeviceMeshBuilder},
    pmap::{PMap, sharded::Sharded},
    replica::{
        Replica,
        rng::{BatchKey, BatchKeys, ReplicaRng},
    },
    spec::{P, Specs, cut::Uneven, tree::TensorTree},
};

/// Items for the crates that stand on this one, which may change with any version.
///
/// Some of its errors carry such items too: they can be displayed, and are not to be matched.
#[doc(hidden)]
pub mod support {
    pub use crate::{
        device::threads::THREAD_VARIABLES,
        engine::{
            layout::{Run, RunLayout},
            traffic::{Tally, Traffic},
        },
        error::{LayoutFault, call::CollectiveCall},
        replica::pending::Pending,
    };
}

#[doc(hidden)]
pub use crate::error::one_line;

/// For [`tensor_tree!`], whose callers may have candle under another name.
#[doc(hidden)]
pub use candle_core::Tensor as __Tensor;
