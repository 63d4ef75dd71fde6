//! [`AdamW`]: crate::AdamW
//! [`Checkpoints`]: crate::Checkpoints
//! [`DataParallel`]: crate::DataParallel
//! [`DistributedModel`]: crate::DistributedModel
//! [`FullyShard`]: crate::FullyShard
//! [`Units`]: crate::Units
// The README links to the registry. rustdoc uses the first of two definitions, so on this page the
// definitions above link to the crate itself.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod agreement;
mod batch;
mod batch_norm;
mod check;
mod device;
mod error;
mod grad;
mod gradient_report;
mod lora;
mod loss;
mod metrics;
mod model;
mod optim;
mod parameters;
mod precision;
mod progress;
mod schedule;
mod sharded;
mod step;
mod tree;
mod units;

pub use dist_checkpoint::{
    Checkpoint, Checkpoints, Error as CheckpointError, ParameterError, SkippedCheckpoint, StateDict,
};

pub use crate::{
    batch_norm::SyncBatchNorm,
    error::{Error, Result, gradient::GradientError, training::TrainingError},
    grad::{ValueAndGrad, value_and_grad},
    gradient_report::{GradientReport, PrefixCheck, Verdict},
    lora::{Lora, save::PretrainedFiles},
    loss::{Loss, Weight},
    metrics::{
        MeanLoss, StepMetrics,
        log::{MetricsLog, peak_bytes},
        read::{Metrics, TimedStep},
    },
    model::{
        DistributedModel,
        builder::{Group, ModelBuilder},
        entry_points::{DataParallel, FullyShard},
    },
    optim::{
        StatefulOptimizer,
        adamw::AdamW,
        sgd::{ParamsSgd, Sgd},
    },
    parameters::declare::{Declared, declare},
    schedule::Schedule,
    step::rules::{Evaluation, Step},
    units::{Units, accumulation::Accumulation, keep_rules::Keep, rules::UnitRules},
};
