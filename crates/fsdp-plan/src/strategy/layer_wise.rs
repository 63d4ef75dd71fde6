//! Whole layers to ranks: nothing is cut, so a layer is fetched from one place.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
};

use core_types::{Rank, WorldSize};

use super::{ShardingStrategy, assemble, divisible};
use crate::{Cut, ParameterInfo, ShardingPlan, error::Result};

/// Gives whole layers to ranks, so that the largest share of bytes is small.
///
/// Layers are taken from the largest to the smallest, and each goes to the rank with the fewest bytes so far: Graham's
/// longest-processing-time rule, never more than 4/3 of the optimum (R. L. Graham, "Bounds on Multiprocessing Timing
/// Anomalies", 1969). Among ranks with equally many bytes, the one with fewer layers is taken, then the first; among
/// equally large layers, the one that comes first. So no rank is left without a layer while another has two.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{ElemType, LayerWise, ParameterInfo, ShardingStrategy};
///
/// let parameters: Vec<_> = [("h.0.w", 3), ("h.1.w", 2), ("h.2.w", 2)]
///     .map(|(name, rows)| ParameterInfo::new(name, [rows], ElemType::F32))
///     .into_iter()
///     .collect::<Result<_, _>>()?;
/// let world_size = WorldSize::new(2)?;
/// let plan = LayerWise::default().plan(&parameters, world_size)?;
/// let names = |rank| plan.shards_of_rank(rank).map(|(parameter, _)| parameter.info().name()).collect::<Vec<_>>();
/// let by_rank: Vec<_> = world_size.placements().map(|place| names(place.rank())).collect();
/// assert_eq!(by_rank, [vec!["h.0.w"], vec!["h.1.w", "h.2.w"]]);
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct LayerWise;

impl ShardingStrategy for LayerWise {
    fn name(&self) -> &'static str {
        "layer-wise"
    }

    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
        let owners = Owners::choose(divisible(parameters), world_size);
        assemble(self.name(), world_size, parameters, |info| owners.cut(info))
    }
}

/// Which rank each layer goes to.
pub(super) struct Owners<'a>(BTreeMap<&'a str, Rank>);

impl<'a> Owners<'a> {
    pub(super) fn choose(parameters: impl Iterator<Item = &'a ParameterInfo>, world_size: WorldSize) -> Self {
        // A rank with the bytes and the number of its layers; the least of them takes the next layer.
        let mut ranks: BinaryHeap<_> = world_size.placements().map(|place| Reverse((0, 0, place.rank()))).collect();
        let mut owners = BTreeMap::new();
        for (layer, layer_bytes) in largest_first(parameters) {
            if let Some(mut least) = ranks.peek_mut() {
                let Reverse((bytes, n_layers, rank)) = *least;
                *least = Reverse((bytes + layer_bytes, n_layers + 1, rank));
                owners.insert(layer, rank);
            }
        }
        Self(owners)
    }

    /// The cut of a parameter of one of the layers.
    pub(super) fn cut(&self, info: &ParameterInfo) -> Cut {
        Cut::Whole { owner: self.0[info.layer()] }
    }
}

/// The layers with their bytes, the largest first, equal ones in the order in which they first occur.
fn largest_first<'a>(parameters: impl Iterator<Item = &'a ParameterInfo>) -> Vec<(&'a str, u128)> {
    let mut positions = BTreeMap::new();
    let mut layers: Vec<(&str, u128)> = Vec::new();
    for info in parameters {
        let position = *positions.entry(info.layer()).or_insert(layers.len());
        if position == layers.len() {
            layers.push((info.layer(), 0));
        }
        layers[position].1 += u128::from(info.bytes());
    }
    layers.sort_by_key(|&(_, bytes)| Reverse(bytes));
    layers
}
