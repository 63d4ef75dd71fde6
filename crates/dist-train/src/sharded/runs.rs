//! Which items of a parameter a plan gives to whom, in candle's numbers.

use std::{collections::BTreeMap, ops::Range};

use candle_core::DType;
use core_types::{Placement, Rank, WorldSize};
use fsdp_plan::{ParameterInfo, PlannedParameter, ShardingPlan};

use crate::{
    dtype::dtype_of,
    error::{Result, parameter::ParameterError},
};

/// The shapes of the parameters that are kept, by name; those that are tied to others are not.
pub(super) fn shapes(plan: &ShardingPlan) -> BTreeMap<String, Vec<usize>> {
    plan.parameters()
        .iter()
        .map(PlannedParameter::info)
        .filter(|info| info.tied_to().is_none())
        .map(|info| (info.name().to_owned(), shape(info)))
        .collect()
}

/// The shape of a parameter.
pub(super) fn shape(parameter: &ParameterInfo) -> Vec<usize> {
    parameter.shape().iter().map(|&dim| index(dim)).collect()
}

/// The type of a parameter's items.
pub(super) fn dtype(parameter: &ParameterInfo) -> Result<DType, ParameterError> {
    dtype_of(parameter.dtype()).ok_or_else(|| ParameterError::UnknownDtype {
        name: parameter.name().to_owned(),
        dtype: parameter.dtype().to_string(),
    })
}

/// The runs of a parameter's items that one rank keeps.
pub(super) fn of_rank(
    plan: &ShardingPlan,
    param_idx: usize,
    rank: Rank,
) -> Result<Vec<Range<usize>>> {
    let mut runs = Vec::new();
    for shard in plan.shards(param_idx, rank)? {
        let start = index(shard.start_offset);
        runs.push(start..start + index(shard.shard_size));
    }
    Ok(runs)
}

/// A run of a parameter that is put together.
#[derive(Clone, Debug)]
pub(super) struct GatheredRun {
    /// Its first item, in the parameter.
    pub(super) start: usize,
    /// Where it lies in what the slots of a shard group contribute, one after the other.
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// All runs of a parameter, in the order of the ranks of a shard group.
pub(super) fn gathered(plan: &ShardingPlan, param_idx: usize) -> Result<Vec<GatheredRun>> {
    let mut offset = 0;
    let mut runs = Vec::new();
    for rank in ranks(plan.shard_group()) {
        for run in of_rank(plan, param_idx, rank)? {
            runs.push(GatheredRun { start: run.start, offset, len: run.len() });
            offset += run.len();
        }
    }
    Ok(runs)
}

/// Every rank of a world in order.
pub(super) fn ranks(world_size: WorldSize) -> impl Iterator<Item = Rank> {
    world_size.placements().map(Placement::rank)
}

/// A size or position of a plan, which counts in 64 bits, as candle counts it.
#[expect(clippy::cast_possible_truncation, reason = "asserted when it is compiled")]
pub(super) fn index(size: u64) -> usize {
    const { assert!(usize::BITS >= u64::BITS, "training needs a system of 64 bits") };
    size as usize
}
