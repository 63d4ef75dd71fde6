//! The items that a plan assigns to each rank, in candle's integer types.

use std::ops::Range;

use candle_core::DType;
use core_types::{Placement, Rank, WorldSize};
use dist_checkpoint::{ParameterError, TensorInfo, support::dtype_of};
use fsdp_plan::{ParameterInfo, ShardingPlan};

use crate::error::Result;

/// Returns the shape of a parameter.
pub(super) fn shape(parameter: &ParameterInfo) -> Vec<usize> {
    parameter.shape().iter().map(|&dim| index(dim)).collect()
}

/// Returns the dtype of a parameter.
pub(super) fn dtype(parameter: &ParameterInfo) -> Result<DType, ParameterError> {
    dtype_of(parameter.dtype()).ok_or_else(|| ParameterError::UnknownDtype {
        name: parameter.name().to_owned(),
        dtype: parameter.dtype().to_string(),
    })
}

/// Describes a parameter as in a file.
pub(crate) fn tensor_info(parameter: &ParameterInfo) -> Result<TensorInfo, ParameterError> {
    let (name, shape) = (parameter.name().to_owned(), shape(parameter));
    Ok(TensorInfo { name, shape, dtype: dtype(parameter)? })
}

/// Returns the ranges of a parameter's items that one rank stores.
pub(super) fn rank_runs(
    plan: &ShardingPlan,
    param_idx: usize,
    rank: Rank,
) -> Result<Vec<Range<usize>>> {
    let shard = plan.shard(param_idx, rank)?;
    let runs = shard.into_iter().map(|shard| {
        let start = index(shard.start_offset);
        start..start + index(shard.shard_size)
    });
    Ok(runs.collect())
}

/// Iterates over the ranks of a world in order.
pub(super) fn ranks(world_size: WorldSize) -> impl Iterator<Item = Rank> {
    world_size.placements().map(Placement::rank)
}

/// Converts a size or index of a plan, which has 64 bits, to `usize`.
#[expect(clippy::cast_possible_truncation, reason = "asserted at compile time")]
pub(super) fn index(size: u64) -> usize {
    const { assert!(usize::BITS >= u64::BITS, "training needs a system of 64 bits") };
    size as usize
}
