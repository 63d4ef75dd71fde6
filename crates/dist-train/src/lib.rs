//! [Coming from PyTorch's DDP and FSDP]: crate::coming_from_ddp
//! [`AdamW`]: crate::AdamW
//! [`CheckpointError`]: crate::CheckpointError
//! [`DataParallel`]: crate::DataParallel
//! [`Error`]: crate::Error
//! [`FullyShard`]: crate::FullyShard
//! [`GradientError`]: crate::GradientError
//! [`Keep`]: crate::Keep
//! [`Loss`]: crate::Loss
//! [`ParameterError`]: crate::ParameterError
//! [`Schedule`]: crate::Schedule
//! [`Sgd`]: crate::Sgd
//! [`ShardedVars`]: crate::ShardedVars
//! [`ShardingError`]: crate::ShardingError
//! [`StateDict`]: crate::StateDict
//! [`StatefulOptimizer`]: crate::StatefulOptimizer
//! [`SyncBatchNorm`]: crate::SyncBatchNorm
//! [`TrainingError`]: crate::TrainingError
//! [`UnitRules`]: crate::UnitRules
//! [`Units`]: crate::Units
//! [`declare`]: crate::declare()
//! [`feed`]: crate::feed()
//! [`parameter_infos`]: crate::parameter_infos()
//! [`value_and_grad`]: crate::value_and_grad()
// The README's links go to the registry. The first of two definitions counts: on this page, where
// those above come first, they go to the crate itself.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod agreement;
mod batch;
mod batch_norm;
mod check;
mod checkpoint;
mod data_parallel;
mod dtype;
mod error;
mod feed;
mod fsdp;
mod grad;
mod gradient_report;
mod lora;
mod loss;
mod metrics;
mod moving;
mod optim;
mod ownership;
mod parameters;
mod processes;
mod progress;
mod schedule;
mod sharded;
mod step;
mod stored;
mod tree;
mod units;

#[cfg(any(test, fuzzing))]
pub use crate::checkpoint::fuzzing;
pub use crate::{
    batch_norm::SyncBatchNorm,
    checkpoint::{Checkpoints, read::Checkpoint, state_dict::StateDict},
    data_parallel::{
        DataParallel,
        builder::{DataParallelBuilder, Group},
    },
    error::{
        Error, Result,
        checkpoint::{CheckpointError, FilePart, PassedOver},
        gradient::GradientError,
        lora::LoraError,
        parameter::ParameterError,
        setting::SettingError,
        sharding::ShardingError,
        training::TrainingError,
    },
    feed::{Feed, Feeding, feed},
    fsdp::{FullyShard, accumulation::Accumulation, builder::FullyShardBuilder, keep::Keep},
    grad::{ValueAndGrad, value_and_grad},
    gradient_report::{GradientReport, PrefixCheck, Verdict},
    lora::{Lora, linear::LoraLinear},
    loss::{Loss, Weight},
    metrics::{
        MeanLoss, StepMetrics,
        log::{MetricsLog, peak_bytes},
        read::{Metrics, TimedStep},
    },
    optim::{
        StatefulOptimizer,
        adamw::AdamW,
        sgd::{ParamsSgd, Sgd},
    },
    parameters::{
        declare::{Declared, declare},
        save::PretrainedFiles,
    },
    schedule::Schedule,
    sharded::{ShardedVars, describe::parameter_infos},
    step::rules::{Evaluation, Step},
    units::{Units, rules::UnitRules},
};

// The README links to the file; the line above it, which comes first, to this page instead.
#[cfg(doc)]
#[doc = include_str!("../docs/coming-from-ddp.md")]
pub mod coming_from_ddp {}
