//! [Coming from JAX]: crate::coming_from_jax
//! [`DeviceMesh`]: crate::DeviceMesh
//! [`Error`]: crate::Error
//! [`P`]: crate::P
//! [`PMap`]: crate::PMap
//! [`Pending`]: crate::Pending
//! [`Replica`]: crate::Replica
//! [`Sharded`]: crate::Sharded
//! [`TensorTree`]: crate::TensorTree
// The README's links go to the registry. The first of two definitions counts: on this page, where
// those above come first, they go to the crate itself.
#![doc = include_str!("../README.md")]

mod ending;
mod engine;
mod error;
mod mesh;
mod pmap;
mod reduce;
mod replica;
mod spec;
mod sync;

#[cfg(feature = "nccl")]
pub use crate::engine::nccl::NcclStore;
pub use crate::{
    engine::{
        call::CollectiveCall,
        layout::{Run, RunLayout},
        traffic::{Tally, Traffic},
    },
    error::{
        CollectiveError, Error, LayoutFault, MeshError, ProcessError, ReplicaError, Result,
        ValueError, one_line,
    },
    mesh::{
        DeviceMesh, DeviceMeshBuilder,
        axes::{ALL, MeshAxes},
        threads::{THREAD_VARIABLES, init_threads},
    },
    pmap::{PMap, sharded::Sharded},
    replica::{
        Replica,
        pending::Pending,
        rng::{BatchKey, BatchKeys, ReplicaRng},
    },
    spec::{
        P, Specs,
        cut::Uneven,
        fault::{Side, SpecFault},
        tree::TensorTree,
    },
};

/// For [`tensor_tree!`], whose callers may have candle under another name.
#[doc(hidden)]
pub use candle_core::Tensor as __Tensor;

// The README links to the file; the line above it, which comes first, to this page instead.
#[cfg(doc)]
#[doc = include_str!("../docs/coming-from-jax.md")]
pub mod coming_from_jax {}
