//! Whole layers to ranks: nothing is cut, so a layer is fetched from one place.

use std::collections::BTreeMap;

use core_types::{Placement, Rank, WorldSize};
use serde::Serialize;

use super::{ShardingStrategy, assemble, balance, divisible};
use crate::{
    cut::Cut,
    error::{Error, Result},
    groups::Groups,
    param::ParameterInfo,
    plan::ShardingPlan,
};

/// Gives whole layers to ranks, so that the largest share is small.
///
/// By default layers go wherever they balance best: the better of the longest-processing-time rule
/// (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969) and MULTIFIT (E. G. Coffman,
/// M. R. Garey, D. S. Johnson, "An Application of Bin-Packing to Multiprocessor Scheduling", 1978).
/// [`LayerOrder::Contiguous`] gives each rank a run of layers instead, as stages of a pipeline need
/// it, with the smallest possible largest share. Either way no rank is left without a layer while
/// another has two.
///
/// [`balance`](Self::balance) tells how good the result is, and [`ShardingPlan::layer_balance`]
/// does for a plan.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     ElemType, ParameterInfo,
///     strategy::{LayerWise, ShardingStrategy},
/// };
///
/// let parameters: Vec<_> = [("h.0.w", 3), ("h.1.w", 2), ("h.2.w", 2)]
///     .map(|(name, rows)| ParameterInfo::new(name, [rows], ElemType::F32))
///     .into_iter()
///     .collect::<Result<_, _>>()?;
/// let world_size = WorldSize::new(2)?;
/// let plan = LayerWise::default().plan(&parameters, world_size)?;
/// let owners: Vec<_> = parameters
///     .iter()
///     .map(|info| plan.owner_of(info.name()).map(|rank| rank.as_u64()))
///     .collect();
/// assert_eq!(owners, [Some(0), Some(1), Some(1)]);
/// assert_eq!(plan.layer_balance().unwrap().lower_bound, 16); // two of three layers must share a rank
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LayerWise {
    weight: LayerWeight,
    order: LayerOrder,
}

/// What [`LayerWise`] balances.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerWeight {
    /// Bytes of parameters.
    #[default]
    Bytes,
    /// Elements of parameters, whatever their type.
    Numel,
    /// A cost of your own for each layer, such as its measured milliseconds.
    Costs(BTreeMap<String, u64>),
}

/// Which layers may share a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum LayerOrder {
    /// Any.
    #[default]
    Any,
    /// Neighbors only, in the order of the parameters: the first layers on the first rank, and so
    /// on.
    Contiguous,
}

/// How well layers are balanced, in the unit of their weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct LayerBalance {
    /// The largest share of a rank.
    pub largest: u64,
    /// No assignment of whole layers to these ranks, in any order, has a smaller largest share. The
    /// optimum may lie above it.
    pub lower_bound: u64,
    /// The share that every rank would have if layers could be cut, rounded up: what cutting could
    /// still gain.
    pub if_cut: u64,
}

impl LayerWise {
    /// Sets what is balanced. Default: [`LayerWeight::Bytes`].
    #[must_use]
    pub fn with_weight(mut self, weight: LayerWeight) -> Self {
        self.weight = weight;
        self
    }

    /// Sets which layers may share a rank. Default: [`LayerOrder::Any`].
    #[must_use]
    pub fn with_order(mut self, order: LayerOrder) -> Self {
        self.order = order;
        self
    }

    /// How well the layers of `parameters` can be balanced over `world_size` ranks by this
    /// strategy.
    ///
    /// # Errors
    ///
    /// [`Error::NoLayerCost`] if costs are given and one is missing, [`Error::TotalTooLarge`] if
    /// the weights together do not fit into 64 bits.
    pub fn balance(
        &self,
        parameters: &[ParameterInfo],
        world_size: WorldSize,
    ) -> Result<LayerBalance> {
        let layers = Layers::of(&divisible(parameters), &self.weight)?;
        Ok(LayerBalance::of(&layers.weights, &layers.owners(self.order, world_size), world_size))
    }

    /// The cuts of `infos`, in their order.
    pub(super) fn cuts(&self, infos: &[&ParameterInfo], group: WorldSize) -> Result<Vec<Cut>> {
        let layers = Layers::of(infos, &self.weight)?;
        let owners = layers.owners(self.order, group);
        let ranks: Vec<Rank> = group.placements().map(Placement::rank).collect();
        Ok(layers
            .names
            .of_item
            .iter()
            .map(|&layer| Cut::Whole { owner: ranks[owners[layer]] })
            .collect())
    }
}

impl ShardingStrategy for LayerWise {
    fn name(&self) -> &'static str {
        "layer-wise"
    }

    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
        let cuts = self.cuts(&divisible(parameters), world_size)?;
        assemble(self.name(), world_size, parameters, cuts)
    }
}

/// The layers of some parameters.
struct Layers<'a> {
    names: Groups<'a>,
    weights: Vec<u64>,
}

impl<'a> Layers<'a> {
    fn of(infos: &[&'a ParameterInfo], weight: &LayerWeight) -> Result<Self> {
        let names = Groups::of(infos.iter().map(|info| info.layer()));
        let weights = match weight {
            LayerWeight::Bytes => sums(infos, &names, ParameterInfo::bytes)?,
            LayerWeight::Numel => sums(infos, &names, ParameterInfo::numel)?,
            LayerWeight::Costs(costs) => {
                let cost = |&layer: &&str| costs.get(layer).copied().ok_or_else(|| no_cost(layer));
                names.names.iter().map(cost).collect::<Result<_>>()?
            }
        };
        let total = weights.iter().try_fold(0_u64, |total, &weight| total.checked_add(weight));
        total.map(|_| Self { names, weights }).ok_or(TOO_LARGE)
    }

    /// The number of the rank that each layer goes to.
    fn owners(&self, order: LayerOrder, world_size: WorldSize) -> Vec<usize> {
        match order {
            LayerOrder::Any => balance::balanced(&self.weights, world_size.as_usize()),
            LayerOrder::Contiguous => balance::contiguous(&self.weights, world_size.as_usize()),
        }
    }
}

const TOO_LARGE: Error = Error::TotalTooLarge { what: "the weights of all layers" };

fn no_cost(layer: &str) -> Error {
    Error::NoLayerCost { layer: layer.to_owned() }
}

/// The weight of each group, as the sum over its items.
fn sums(
    infos: &[&ParameterInfo],
    groups: &Groups<'_>,
    weight: impl Fn(&ParameterInfo) -> u64,
) -> Result<Vec<u64>> {
    let mut sums = vec![0_u64; groups.names.len()];
    for (info, &group) in infos.iter().zip(&groups.of_item) {
        sums[group] = sums[group].checked_add(weight(info)).ok_or(TOO_LARGE)?;
    }
    Ok(sums)
}

impl LayerBalance {
    /// The balance of layers of the given weights on the ranks of the given numbers. The weights
    /// together fit 64 bits.
    fn of(weights: &[u64], owners: &[usize], world_size: WorldSize) -> Self {
        let n_ranks = world_size.as_usize();
        let narrow = |sum: u128| u64::try_from(sum).unwrap_or(u64::MAX);
        Self {
            largest: narrow(balance::largest_sum(weights, owners, n_ranks)),
            lower_bound: narrow(balance::lower_bound(weights, n_ranks)),
            if_cut: weights.iter().sum::<u64>().div_ceil(world_size.as_u64()),
        }
    }
}

impl ShardingPlan {
    /// How well the layers that this plan keeps whole are balanced over the shard group, in bytes.
    ///
    /// `None` if it keeps none whole, or if their bytes do not fit into 64 bits.
    pub fn layer_balance(&self) -> Option<LayerBalance> {
        let whole = self.parameters().iter().filter_map(|parameter| match parameter.cut() {
            Cut::Whole { owner } => Some((parameter.info(), owner)),
            _ => None,
        });
        let (infos, ranks): (Vec<_>, Vec<_>) = whole.unzip();
        let layers = Layers::of(&infos, &LayerWeight::Bytes).ok()?;
        let mut owners = vec![0; layers.weights.len()];
        layers
            .names
            .of_item
            .iter()
            .zip(ranks)
            .for_each(|(&layer, rank)| owners[layer] = rank.as_usize());
        (!infos.is_empty()).then(|| LayerBalance::of(&layers.weights, &owners, self.shard_group()))
    }

    /// The rank of the first shard group that owns the whole of the parameter `name`; `None` if
    /// none does.
    pub fn owner_of(&self, name: &str) -> Option<Rank> {
        match self.parameters()[self.index_of(name)?].cut() {
            Cut::Whole { owner } => Some(owner),
            _ => None,
        }
    }
}
