//! Assignment of whole layers to ranks: nothing is cut, so a layer is fetched from one rank.

use core_types::{Placement, Rank, WorldSize};
use serde::Serialize;

use super::{ShardingStrategy, assemble, balance, divisible};
use crate::{
    cut::Cut,
    error::{Error, Result},
    param::{ParameterInfo, groups::NamedGroups},
    plan::ShardingPlan,
};

/// Assigns whole layers to ranks such that the largest share is small.
///
/// By default any layers may share a rank; the assignment is the better of the
/// longest-processing-time rule (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969)
/// and MULTIFIT (E. G. Coffman, M. R. Garey, D. S. Johnson, "An Application of Bin-Packing to
/// Multiprocessor Scheduling", 1978). [`LayerSharing::Contiguous`] gives each rank a run of layers,
/// as pipeline stages need, with the smallest possible largest share. In both cases no rank stays
/// without a layer while another rank has two.
///
/// A [`PlanReport`](crate::report::PlanReport) compares the largest share with a proven lower bound.
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
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "callers name the field")]
pub struct LayerWise {
    /// Layers that may share a rank; [`LayerSharing::Any`] by default.
    pub sharing: LayerSharing,
}

/// The layers that may share a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum LayerSharing {
    /// Any layers.
    #[default]
    Any,
    /// Only neighbors, in the order of the parameters: the first layers on the first rank, and so
    /// on.
    Contiguous,
}

/// The balance of whole layers over ranks, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LayerBalance {
    /// Largest share of a rank.
    pub(crate) largest: u64,
    /// Lower bound of the largest share of any assignment of whole layers. The optimum may be above
    /// it.
    pub(crate) lower_bound: u64,
    /// Share of every rank if layers could be cut, rounded up.
    pub(crate) if_cut: u64,
}

impl LayerWise {
    /// Returns the cuts of `infos`, in their order.
    pub(super) fn cuts(&self, infos: &[&ParameterInfo], n_ranks: WorldSize) -> Result<Vec<Cut>> {
        let layers = WeightedLayers::new(infos)?;
        let owners = match self.sharing {
            LayerSharing::Any => balance::assign_any(&layers.weights, n_ranks),
            LayerSharing::Contiguous => balance::assign_contiguous(&layers.weights, n_ranks),
        };
        let ranks: Vec<Rank> = n_ranks.placements().map(Placement::rank).collect();
        let layer_of_item = layers.groups.group_of_item.iter();
        Ok(layer_of_item.map(|&layer| Cut::Whole { owner: ranks[owners[layer]] }).collect())
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

/// The layers of some parameters with their bytes.
struct WeightedLayers<'a> {
    groups: NamedGroups<'a>,
    weights: Vec<u64>,
}

impl<'a> WeightedLayers<'a> {
    /// Groups parameters by layer and adds up their bytes.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if the bytes of all layers exceed 64 bits.
    fn new(infos: &[&'a ParameterInfo]) -> Result<Self> {
        let groups = NamedGroups::from_names(infos.iter().map(|info| info.layer()));
        let mut weights = vec![0_u64; groups.names.len()];
        let mut total = 0_u64;
        for (info, &layer) in infos.iter().zip(&groups.group_of_item) {
            total = total.checked_add(info.bytes()).ok_or(TOO_LARGE)?;
            weights[layer] += info.bytes();
        }
        Ok(Self { groups, weights })
    }

    /// Returns the rank number of each layer, given the owner of each parameter, or `None` if a
    /// layer has several owners.
    fn single_owners(&self, ranks: &[Rank]) -> Option<Vec<usize>> {
        let mut owners = vec![None; self.weights.len()];
        for (&layer, rank) in self.groups.group_of_item.iter().zip(ranks) {
            if owners[layer].replace(rank).is_some_and(|other| other != rank) {
                return None;
            }
        }
        owners.into_iter().map(|owner| owner.map(|rank| rank.as_usize())).collect()
    }
}

const TOO_LARGE: Error = Error::TotalTooLarge { what: "the weights of all layers" };

impl LayerBalance {
    /// Computes the balance of layers, given their weights and rank numbers.
    ///
    /// The sum of the weights must fit into 64 bits.
    fn new(weights: &[u64], owners: &[usize], world_size: WorldSize) -> Self {
        #[expect(
            clippy::expect_used,
            reason = "`WeightedLayers::new` checks the sum of all weights"
        )]
        let narrow = |sum: u128| u64::try_from(sum).expect("no rank has more than all weights");
        Self {
            largest: narrow(balance::largest_sum(weights, owners, world_size.as_usize())),
            lower_bound: narrow(balance::lower_bound(weights, world_size)),
            if_cut: weights.iter().sum::<u64>().div_ceil(world_size.as_u64()),
        }
    }
}

impl ShardingPlan {
    /// Returns the balance of the whole layers of this plan over the shard group, in bytes.
    ///
    /// Returns `None` if the plan has no whole layers, if a layer has several owners, or if the
    /// bytes exceed 64 bits.
    pub(crate) fn layer_balance(&self) -> Option<LayerBalance> {
        let mut infos = Vec::new();
        let mut ranks = Vec::new();
        for parameter in self.parameters() {
            if let Some(owner) = parameter.cut().owner() {
                infos.push(parameter.info());
                ranks.push(owner);
            }
        }
        if infos.is_empty() {
            return None;
        }
        let layers = WeightedLayers::new(&infos).ok()?;
        let owners = layers.single_owners(&ranks)?;
        Some(LayerBalance::new(&layers.weights, &owners, self.shard_group()))
    }
}
