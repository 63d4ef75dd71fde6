#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod checkpoint;
mod data_parallel;
mod error;
mod grad;
mod optim;
mod sharded;
mod sync;

pub use crate::{
    checkpoint::{Checkpoint, Checkpoints, StateDict},
    data_parallel::DataParallel,
    error::{Error, Result},
    grad::{ValueAndGrad, value_and_grad},
    optim::{StatefulOptimizer, adamw::AdamW},
    sharded::{ShardedVars, describe::parameter_infos},
};

#[cfg(doctest)]
#[doc = include_str!("../docs/coming-from-ddp.md")]
struct ComingFromDdp;
