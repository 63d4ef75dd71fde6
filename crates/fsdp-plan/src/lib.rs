//! [`Cut`]: crate::Cut
//! [`ElemType`]: crate::ElemType
//! [`Full`]: crate::strategy::Full
//! [`Hsdp`]: crate::strategy::Hsdp
//! [`Hybrid`]: crate::strategy::Hybrid
//! [`LayerWise`]: crate::strategy::LayerWise
//! [`Layout`]: crate::strategy::Layout
//! [`ParameterInfo`]: crate::ParameterInfo
//! [`Pattern`]: crate::Pattern
//! [`PlanCost`]: crate::cost::PlanCost
//! [`Reshard`]: crate::reshard::Reshard
//! [`ShardAssignment`]: crate::ShardAssignment
//! [`ShardingPlan`]: crate::ShardingPlan
//! [`WholeTensor`]: crate::strategy::WholeTensor
// The README's links go to the registry. The first of two definitions counts: on this page, where
// those above come first, they go to the crate itself.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod arithmetic;
pub mod cost;
mod cut;
mod elem;
mod error;
mod format;
mod groups;
mod names;
mod param;
mod path;
mod pattern;
mod plan;
mod render;
pub mod report;
pub mod reshard;
pub mod search;
mod shares;
pub mod source;
pub mod strategy;

pub use self::{
    cut::{Cut, ShardAssignment},
    elem::ElemType,
    error::{CutError, Error, ParameterError, Result, SourceError},
    format::FORMAT_VERSION,
    param::ParameterInfo,
    pattern::Pattern,
    plan::{PlannedParameter, ShardingPlan, ShardsOfRank},
};
