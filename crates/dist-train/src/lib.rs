#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod checkpoint;
mod data_parallel;
mod dtype;
mod error;
mod grad;
mod optim;
mod ownership;
mod parameters;
mod sharded;
mod stored;

pub use crate::{
    checkpoint::{Checkpoints, read::Checkpoint, state_dict::StateDict},
    data_parallel::DataParallel,
    error::{
        Error, Result, checkpoint::CheckpointError, parameter::ParameterError,
        setting::SettingError, sharding::ShardingError,
    },
    grad::{ValueAndGrad, value_and_grad},
    optim::{
        StatefulOptimizer,
        adamw::AdamW,
        sgd::{ParamsSgd, Sgd},
    },
    parameters::declare::{Declared, declare},
    sharded::{ShardedVars, describe::parameter_infos},
};

#[cfg(doctest)]
#[doc = include_str!("../docs/coming-from-ddp.md")]
struct ComingFromDdp;
