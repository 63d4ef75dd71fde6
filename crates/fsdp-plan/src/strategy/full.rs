//! Every rank owns a part of everything: ZeRO stage 3 (arXiv 1910.02054) and FSDP (arXiv
//! 2304.11277).

use std::collections::BTreeMap;

use core_types::WorldSize;

use super::{ShardingStrategy, assemble, divisible};
use crate::{
    Cut, ParameterInfo, ShardingPlan,
    error::{Error, Result},
};

/// Cuts every parameter over all ranks: the least memory per rank, the most traffic.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{Cut, ElemType, Full, Layout, ParameterInfo, ShardingStrategy};
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
pub struct Full {
    layout: Layout,
}

/// How [`Full`] lays parameters out before it cuts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// Each parameter by itself, along dim 0, like PyTorch's `fully_shard` (FSDP2).
    ///
    /// Rows stay whole. Every rank stores the rows of the largest share, so small parameters cost padding.
    #[default]
    Dim0,
    /// The parameters of a unit end to end, like PyTorch's `FullyShardedDataParallel` (FSDP1) with
    /// `use_orig_params=False`.
    ///
    /// Less than one element per rank and unit is padding, but most shards begin and end inside a row.
    Flat,
}

impl Full {
    /// Cuts in the given layout.
    pub fn new(layout: Layout) -> Self {
        Self { layout }
    }
}

impl ShardingStrategy for Full {
    fn name(&self) -> &str {
        match self.layout {
            Layout::Dim0 => "full",
            Layout::Flat => "full-flat",
        }
    }

    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
        match self.layout {
            Layout::Dim0 => assemble(self.name(), world_size, parameters, |_| Cut::Dim0),
            Layout::Flat => {
                let mut units = flat_units(parameters)?;
                assemble(self.name(), world_size, parameters, |info| units.entry(info.unit()).or_default().place(info))
            }
        }
    }
}

/// A unit's flat buffer while parameters are laid into it.
#[derive(Default)]
struct FlatUnit {
    numel: u64,
    placed: u64,
}

impl FlatUnit {
    fn place(&mut self, info: &ParameterInfo) -> Cut {
        let offset = self.placed;
        self.placed += info.numel();
        Cut::Flat { offset, unit_numel: self.numel }
    }
}

/// Measures the units: where a parameter is cut depends on those that come after it too.
fn flat_units(parameters: &[ParameterInfo]) -> Result<BTreeMap<&str, FlatUnit>> {
    let mut units: BTreeMap<&str, FlatUnit> = BTreeMap::new();
    for info in divisible(parameters) {
        let unit = units.entry(info.unit()).or_default();
        let numel = unit.numel.checked_add(info.numel());
        unit.numel = numel.ok_or(Error::TotalTooLarge { what: "the elements of a flat unit" })?;
    }
    Ok(units)
}
