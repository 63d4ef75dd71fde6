//! Whole tensors to ranks, with as few cuts as exact balance allows.

use core_types::WorldSize;

use super::{ShardingStrategy, assemble, divisible};
use crate::{
    cut::Cut,
    error::{Error, Result},
    param::ParameterInfo,
    plan::ShardingPlan,
};

/// Gives each rank the next tensors in order until its share is full, and cuts a tensor only there.
///
/// At most world size − 1 tensors are cut, and the shares of two ranks differ by one block of a
/// dtype at most (one element of most types). It is `McNaughton`'s wrap-around rule for machines
/// that may interrupt jobs (R. `McNaughton`, "Scheduling with Deadlines and Loss Functions", 1959):
/// no assignment is better balanced, nor can one be with fewer cuts for every list of tensors.
/// Optimizers that want tensors whole, such as Muon and Shampoo, and ZeRO stages 1 and 2 divide
/// their work like this.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     ElemType, ParameterInfo,
///     strategy::{ShardingStrategy, WholeTensor},
/// };
///
/// let parameters: Vec<_> = ["a", "b", "c"]
///     .map(|name| ParameterInfo::new(name, [4], ElemType::F32))
///     .into_iter()
///     .collect::<Result<_, _>>()?;
/// let world_size = WorldSize::new(2)?;
/// let plan = WholeTensor.plan(&parameters, world_size)?;
/// for place in world_size.placements() {
///     let sizes: Vec<_> =
///         plan.shards_of_rank(place.rank())?.map(|(_, shard)| shard.shard_size).collect();
///     assert_eq!(sizes, if place.is_last() { [2, 4] } else { [4, 2] });
/// }
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct WholeTensor;

impl ShardingStrategy for WholeTensor {
    fn name(&self) -> &'static str {
        "whole-tensor"
    }

    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
        let divisible = divisible(parameters);
        let total = divisible.iter().try_fold(0_u64, |total, info| total.checked_add(info.bytes()));
        let total_bytes =
            total.ok_or(Error::TotalTooLarge { what: "the bytes of all parameters" })?;
        let mut end = 0;
        let cuts = divisible.iter().map(|info| {
            let offset = end;
            end += info.bytes();
            Cut::Wrapped { offset, total_bytes }
        });
        assemble(self.name(), world_size, parameters, cuts.collect())
    }
}
