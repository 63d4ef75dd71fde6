//! Assignment of whole tensors to ranks, with as few cuts as exact balance allows.

use core_types::WorldSize;

use super::{ShardingStrategy, assemble, divisible};
use crate::{
    cut::Cut,
    error::{Error, Result},
    param::ParameterInfo,
    plan::ShardingPlan,
};

/// Gives each rank the next tensors until its share is full, and cuts only the tensor at that
/// bound.
///
/// At most world size − 1 tensors are cut, and shares differ by at most one block of a dtype (one
/// element of most types). This is `McNaughton`'s wrap-around rule for preemptive scheduling (R.
/// `McNaughton`, "Scheduling with Deadlines and Loss Functions", 1959). No assignment is better
/// balanced, and some lists of tensors need all of these cuts. Optimizers that need whole
/// tensors, such as Muon and Shampoo, and ZeRO stages 1 and 2 divide their work like this.
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
        let infos = divisible(parameters);
        let mut offsets = Vec::with_capacity(infos.len());
        let mut total_bytes = 0_u64;
        for info in infos {
            offsets.push(total_bytes);
            total_bytes = total_bytes
                .checked_add(info.bytes())
                .ok_or(Error::TotalTooLarge { what: "the bytes of all parameters" })?;
        }
        let cuts = offsets.into_iter().map(|offset| Cut::Wrapped { offset, total_bytes });
        assemble(self.name(), world_size, parameters, cuts.collect())
    }
}
