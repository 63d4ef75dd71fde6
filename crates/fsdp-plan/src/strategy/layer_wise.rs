//! Whole layers to ranks: nothing is cut, so a layer is fetched from one place.

use core_types::{Placement, Rank, WorldSize};
use serde::Serialize;

use super::{ShardingStrategy, assemble, balance, divisible};
use crate::{
    cut::Cut,
    error::{Error, Result},
    param::{ParameterInfo, groups::NamedGroups},
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
/// [`ShardingPlan::layer_balance`] compares the result with a proven lower bound.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     Cut, ElemType, ParameterInfo,
///     strategy::{LayerWise, ShardingStrategy},
/// };
///
/// let parameters: Vec<_> = [("h.0.w", 3), ("h.1.w", 2), ("h.2.w", 2)]
///     .map(|(name, rows)| ParameterInfo::new(name, [rows], ElemType::F32))
///     .into_iter()
///     .collect::<Result<_, _>>()?;
/// let world_size = WorldSize::new(2)?;
/// let plan = LayerWise::default().plan(&parameters, world_size)?;
/// assert!(matches!(plan.parameters()[0].cut(), Cut::Whole { owner } if owner.as_u64() == 0));
/// assert_eq!(plan.parameters()[1].cut(), plan.parameters()[2].cut());
/// // Two of three layers must share a rank.
/// assert_eq!(plan.layer_balance().unwrap().lower_bound, 16);
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LayerWise {
    order: LayerOrder,
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

/// How well layers are balanced, in bytes.
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
    /// Sets which layers may share a rank. Default: [`LayerOrder::Any`].
    #[must_use]
    pub fn with_order(mut self, order: LayerOrder) -> Self {
        self.order = order;
        self
    }

    /// The cuts of `infos`, in their order.
    pub(super) fn cuts(&self, infos: &[&ParameterInfo], group: WorldSize) -> Result<Vec<Cut>> {
        let layers = Layers::of(infos)?;
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
    names: NamedGroups<'a>,
    weights: Vec<u64>,
}

impl<'a> Layers<'a> {
    fn of(infos: &[&'a ParameterInfo]) -> Result<Self> {
        let names = NamedGroups::of(infos.iter().map(|info| info.layer()));
        let mut weights = vec![0_u64; names.names.len()];
        for (info, &layer) in infos.iter().zip(&names.of_item) {
            weights[layer] = weights[layer].checked_add(info.bytes()).ok_or(TOO_LARGE)?;
        }
        let total = weights.iter().try_fold(0_u64, |total, &weight| total.checked_add(weight));
        total.map(|_| Self { names, weights }).ok_or(TOO_LARGE)
    }

    /// The number of the rank that owns each layer, given the owner of each parameter; `None` if
    /// the parameters of a layer have different owners.
    fn single_owners(&self, ranks: &[Rank]) -> Option<Vec<usize>> {
        let mut owners = vec![None; self.weights.len()];
        for (&layer, rank) in self.names.of_item.iter().zip(ranks) {
            if owners[layer].replace(rank).is_some_and(|other| other != rank) {
                return None;
            }
        }
        owners.into_iter().map(|owner| owner.map(|rank| rank.as_usize())).collect()
    }

    /// The number of the rank that each layer goes to.
    fn owners(&self, order: LayerOrder, world_size: WorldSize) -> Vec<usize> {
        match order {
            LayerOrder::Any => balance::balanced(&self.weights, world_size),
            LayerOrder::Contiguous => balance::contiguous(&self.weights, world_size),
        }
    }
}

const TOO_LARGE: Error = Error::TotalTooLarge { what: "the weights of all layers" };

impl LayerBalance {
    /// The balance of layers of the given weights on the ranks of the given numbers.
    ///
    /// The weights together fit into 64 bits, so each of the three numbers does.
    fn of(weights: &[u64], owners: &[usize], world_size: WorldSize) -> Self {
        #[expect(clippy::expect_used, reason = "`Layers::of` has added up all weights")]
        let narrow = |sum: u128| u64::try_from(sum).expect("no rank has more than all weights");
        Self {
            largest: narrow(balance::largest_sum(weights, owners, world_size.as_usize())),
            lower_bound: narrow(balance::lower_bound(weights, world_size)),
            if_cut: weights.iter().sum::<u64>().div_ceil(world_size.as_u64()),
        }
    }
}

impl ShardingPlan {
    /// How well the layers that this plan keeps whole are balanced over the shard group, in bytes.
    ///
    /// `None` if it keeps none whole, if a layer has several owners, or if their bytes do not fit
    /// into 64 bits.
    pub fn layer_balance(&self) -> Option<LayerBalance> {
        let owned = self
            .parameters()
            .iter()
            .filter_map(|parameter| Some((parameter.info(), parameter.cut().owner()?)));
        let (infos, ranks): (Vec<_>, Vec<_>) = owned.unzip();
        if infos.is_empty() {
            return None;
        }
        let layers = Layers::of(&infos).ok()?;
        let owners = layers.single_owners(&ranks)?;
        Some(LayerBalance::of(&layers.weights, &owners, self.shard_group()))
    }
}
