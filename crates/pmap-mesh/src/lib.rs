#![doc = include_str!("../README.md")]

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
    },
    pmap::{PMap, sharded::Sharded},
    replica::{Replica, pending::Pending, rng::ReplicaRng},
    spec::{
        P, Specs,
        cut::Uneven,
        fault::{Side, SpecFault},
        tree::TensorTree,
    },
};

#[cfg(doctest)]
#[doc = include_str!("../docs/coming-from-jax.md")]
struct ComingFromJax;
