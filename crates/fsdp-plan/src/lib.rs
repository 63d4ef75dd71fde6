#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod arithmetic;
mod check;
pub mod cost;
mod cut;
mod elem;
mod error;
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
    error::{Error, Result},
    param::ParameterInfo,
    pattern::Pattern,
    plan::{FORMAT_VERSION, PlannedParameter, ShardingPlan, ShardsOfRank},
};
