#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod check;
mod cost;
mod cut;
mod elem;
mod error;
mod param;
mod path;
mod plan;
mod render;
mod report;
pub mod source;
mod strategy;

pub use crate::{
    cost::{Collectives, CostModel, Optimizer, PlanCost, RankCost, Traffic},
    cut::{Cut, ShardAssignment},
    elem::ElemType,
    error::{Error, Result},
    param::ParameterInfo,
    plan::{FORMAT_VERSION, PlannedParameter, ShardingPlan},
    report::PlanReport,
    strategy::{Full, Hybrid, LayerWise, Layout, ShardingStrategy, StrategyKind},
};
