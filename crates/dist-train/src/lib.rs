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
mod data_parallel;
mod device;
mod error;
mod feed;
mod fsdp;
mod grad;
mod gradient_report;
mod lora;
mod loss;
mod metrics;
mod optim;
mod parameters;
mod progress;
mod schedule;
mod sharded;
mod step;
mod tree;
mod units;

pub use dist_checkpoint::{
    Checkpoint, Checkpoints, Error as CheckpointError, FilePart, ParameterError, SkippedCheckpoint,
    StateDict,
};

pub use crate::{
    batch_norm::SyncBatchNorm,
    data_parallel::{
        DataParallel,
        builder::{DataParallelBuilder, Group},
    },
    error::{
        Error, Result, gradient::GradientError, lora::LoraError, sharding::ShardingError,
        training::TrainingError,
    },
    feed::{Feed, Feeding, feed},
    fsdp::{FullyShard, builder::FullyShardBuilder},
    grad::{ValueAndGrad, value_and_grad},
    gradient_report::{GradientReport, PrefixCheck, Verdict},
    lora::{Lora, linear::LoraLinear, save::PretrainedFiles},
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
        describe::parameter_infos,
    },
    schedule::Schedule,
    step::rules::{Evaluation, Step},
    units::{Units, accumulation::Accumulation, keep::Keep, rules::UnitRules},
};

// The README links to the file; the line above it, which comes first, to this page instead.
#[cfg(doc)]
#[doc = include_str!("../docs/coming-from-ddp.md")]
pub mod coming_from_ddp {}
