//! Which items of a parameter a plan gives to whom, in candle's numbers.

use std::ops::Range;

use candle_core::DType;
use core_types::{Placement, Rank, WorldSize};
use dist_checkpoint::{ParameterError, support::dtype_of};
use fsdp_plan::{ParameterInfo, ShardingPlan};

use crate::error::Result;

/// The shape of a parameter.
pub(crate) fn shape(parameter: &ParameterInfo) -> Vec<usize> {
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
