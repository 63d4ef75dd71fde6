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
// The README links to docs.rs. Of two definitions of a link the first wins, so on this page the definitions above
// replace the README's and point into this crate.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod arithmetic;
pub mod cost;
mod cut;
mod elem;
mod error;
mod format;
mod param;
mod pattern;
mod plan;
pub mod report;
pub mod reshard;
pub mod search;
pub mod source;
pub mod strategy;

pub use self::{
    cut::{Cut, ShardAssignment},
    elem::ElemType,
    error::{Error, Result, SourceError},
    param::ParameterInfo,
    pattern::Pattern,
    plan::{PlannedParameter, ShardingPlan},
};

/// Items shared with the other crates of this workspace. They may change in any version.
#[doc(hidden)]
pub mod support {
    pub use crate::{
        cost::{
            schedule::{Calls, HandedOver, Schedule, UnitSchedule},
            transfer::{Transfer, TransferScope},
        },
        source::safetensors::{
            MAX_HEADER_LEN, PREFIX_LEN, SafetensorsHeader, StoredTensor, header_len,
        },
    };
}
