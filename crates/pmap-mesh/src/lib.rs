#![doc = include_str!("../README.md")]

mod adamw;
mod checkpoint;
mod data_parallel;
mod engine;
mod error;
mod grad;
mod join;
mod meeting;
mod mesh;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(feature = "plan")]
mod placement;
mod pmap;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod processes;
mod reduce;
mod replica;
mod rng;
mod shard;
mod sharded;
#[cfg(feature = "plan")]
mod sharded_vars;
mod shared_buffer;
mod spec;
mod threads;
mod topology;
mod transpose;
mod tree;
mod wait;
mod worker;

#[cfg(feature = "nccl")]
pub use crate::nccl::NcclStore;
pub use crate::{
    adamw::{AdamW, StatefulOptimizer},
    checkpoint::{Checkpoint, Checkpoints, StateDict},
    data_parallel::DataParallel,
    error::{Error, Result, SpecFault},
    grad::{ValueAndGrad, value_and_grad},
    meeting::CollectiveCall,
    mesh::{DeviceMesh, DeviceMeshBuilder},
    pmap::PMap,
    replica::Replica,
    rng::ReplicaRng,
    shard::Uneven,
    sharded::Sharded,
    spec::{P, Side, Specs},
    topology::{ALL, MeshAxes},
    tree::TensorTree,
};
#[cfg(feature = "plan")]
pub use crate::{placement::parameter_infos, sharded_vars::ShardedVars};

#[cfg(doctest)]
#[doc = include_str!("../docs/coming-from-jax.md")]
struct ComingFromJax;

#[cfg(all(doctest, feature = "plan"))]
#[doc = include_str!("../docs/coming-from-ddp.md")]
struct ComingFromDdp;
