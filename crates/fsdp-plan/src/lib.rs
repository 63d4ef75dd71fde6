#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod arithmetic;
mod check;
mod cost;
mod cut;
mod diff;
mod elem;
mod error;
mod groups;
mod names;
mod param;
mod path;
mod pattern;
mod plan;
mod render;
mod report;
mod reshard;
mod search;
mod shares;
pub mod source;
mod strategy;

pub use crate::{
    cost::{Collectives, CostModel, Link, Links, Optimizer, PlanCost, RankCost, Traffic},
    cut::{Cut, ShardAssignment},
    diff::PlanDiff,
    elem::ElemType,
    error::{Error, Result},
    param::ParameterInfo,
    pattern::Pattern,
    plan::{FORMAT_VERSION, PlannedParameter, ShardingPlan, ShardsOfRank},
    report::PlanReport,
    reshard::{Move, Reshard, Volume},
    search::{Candidate, Outcome, Search},
    strategy::{
        Choice, Full, Hsdp, Hybrid, LayerBalance, LayerOrder, LayerWeight, LayerWise, Layout, Matches, Rule,
        ShardingStrategy, StrategyKind, WholeTensor,
    },
};
