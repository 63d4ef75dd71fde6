//! Full sharding: ZeRO stage 3 (arXiv 1910.02054) and FSDP (arXiv 2304.11277).

use core_types::WorldSize;

use super::{Layout, ShardingStrategy, assemble, divisible, layout};
use crate::{error::Result, param::ParameterInfo, plan::ShardingPlan};

/// Cuts every parameter over all ranks: the least memory per rank, and the most traffic.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     Cut, ElemType, ParameterInfo,
///     strategy::{Full, Layout, ShardingStrategy},
/// };
///
/// let parameters = [
///     ParameterInfo::new("h.0.weight", [3, 2], ElemType::F32)?,
///     ParameterInfo::new("h.0.bias", [3], ElemType::F32)?,
/// ];
/// let plan = Full::new(Layout::Flat).plan(&parameters, WorldSize::new(2)?)?;
/// assert_eq!(plan.parameters()[1].cut(), Cut::Flat { offset: 6, unit_numel: 9 });
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[doc(alias = "FULL_SHARD")]
pub struct Full {
    layout: Layout,
}

impl Full {
    /// Creates the strategy with a layout.
    pub fn new(layout: Layout) -> Self {
        Self { layout }
    }
}

impl ShardingStrategy for Full {
    fn name(&self) -> &str {
        match self.layout {
            Layout::Dim0 => "full",
            Layout::Flat => "full-flat",
            Layout::FlatAligned => "full-flat-aligned",
            Layout::RowRagged { .. } => "full-row-ragged",
            Layout::BlockRagged { .. } => "full-block-ragged",
        }
    }

    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
        let infos: Vec<_> =
            divisible(parameters).into_iter().map(|info| (info, self.layout)).collect();
        let cuts = layout::cuts(&infos, world_size)?;
        assemble(self.name(), world_size, parameters, cuts)
    }
}
