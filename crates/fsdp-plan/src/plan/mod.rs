//! The plan itself: ordered, validated, plain data with a format version.

mod check;
mod document;
mod parameter;
mod shards;

use std::collections::BTreeSet;

use core_types::{Rank, WorldSize};

pub use self::parameter::PlannedParameter;
pub(crate) use self::shards::ShardsOfRank;
use crate::{
    cut::{Cut, ShardAssignment, shares::Shares},
    error::{CutError, Error, ParameterError, Result},
    param::{groups::NamedGroups, names::Names},
};

/// Who owns which part of every parameter.
///
/// Parameters keep the order in which they were given. A plan holds one [`Cut`] per parameter and
/// nothing per rank, so it is as small for 16,384 ranks as for two; [`shards`](Self::shards)
/// computes a rank's part when it is asked for. (Only a [resized](Self::resized) plan also holds
/// who kept what.) A plan that exists is valid: building and deserializing make the same checks.
///
/// Ranks form **replicas** of one **shard group** each, ranks `0..group` the first, and so on: the
/// mesh `(replicate, shard)` of PyTorch's HSDP. Cuts speak of a group; all replicas hold the same.
/// There is one replica unless [`Hsdp`](crate::strategy::Hsdp) makes several.
///
/// # Examples
///
/// ```
/// use core_types::{Placement, WorldSize};
/// use fsdp_plan::{
///     ElemType, ParameterInfo, ShardingPlan,
///     strategy::{Full, ShardingStrategy},
/// };
///
/// let parameters = [ParameterInfo::new("fc.weight", [10, 4], ElemType::F32)?];
/// let plan = Full::default().plan(&parameters, WorldSize::new(4)?)?;
///
/// let last = Placement::new(3, 4)?.rank();
/// let shard = plan.shards(0, last)?.next().unwrap();
/// assert_eq!((shard.start_offset, shard.shard_size), (36, 4)); // rows are cut 3, 3, 3, 1
/// assert_eq!((shard.dim0_start, shard.dim0_rows), (Some(9), Some(1)));
///
/// let json = serde_json::to_string(&plan).unwrap();
/// assert_eq!(serde_json::from_str::<ShardingPlan>(&json).unwrap(), plan);
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardingPlan {
    strategy: String,
    world_size: WorldSize,
    shares: Shares,
    /// Units that stay gathered between forward and backward pass, besides the root unit; sorted.
    kept_units: BTreeSet<String>,
    parameters: Vec<PlannedParameter>,
    names: Names,
}

impl ShardingPlan {
    /// Builds a plan from the cuts that the strategy named `strategy` chose.
    ///
    /// # Errors
    ///
    /// - [`ParameterError::Empty`] or [`ParameterError::DuplicateName`];
    /// - [`CutError::AlwaysGathered`] if a parameter that must be gathered always is not
    ///   [`Cut::Replicated`];
    /// - [`CutError::Tied`] if a tied parameter is not [`Cut::Tied`], or another one is;
    ///   [`ParameterError::BadTie`] if what it is tied to does not exist, is tied itself, or
    ///   differs in shape, dtype or unit;
    /// - [`CutError::Scalar`] if a parameter without dims is cut along dim 0;
    /// - [`CutError::SplitsBlock`] or [`CutError::BadGranule`] if a block of a dtype would be cut;
    /// - [`Error::World`] if an owner is no rank of the world;
    /// - [`CutError::MixedUnit`] or [`CutError::BrokenUnit`] if the parameters of a buffer, in the
    ///   order given, differ in dtype or in being trained where that must not be, or do not lie
    ///   side by side.
    pub fn new(
        strategy: impl Into<String>,
        world_size: WorldSize,
        parameters: Vec<PlannedParameter>,
    ) -> Result<Self> {
        Self::with_shares(strategy.into(), Shares::even(world_size), parameters)
    }

    fn with_shares(
        strategy: String,
        shares: Shares,
        parameters: Vec<PlannedParameter>,
    ) -> Result<Self> {
        if parameters.is_empty() {
            return Err(Error::Parameters(ParameterError::Empty));
        }
        let name = |position: usize| parameters[position].info().name();
        let duplicate = |position| {
            Error::Parameters(ParameterError::DuplicateName { name: name(position).to_owned() })
        };
        let hashed = |position: usize| (parameters[position].info().name_hash(), name(position));
        let names = Names::new(parameters.len(), hashed).map_err(duplicate)?;
        check::cuts(&parameters, shares.group())?;
        check::ties(&parameters, |wanted| {
            names.find(wanted, name).map(|position| &parameters[position])
        })?;
        check::buffers(&parameters)?;
        let world_size = shares.group();
        Ok(Self { strategy, world_size, shares, kept_units: BTreeSet::new(), parameters, names })
    }

    /// Repeats the plan's shard group: `replicas` groups of as many ranks, each holding the whole
    /// model.
    ///
    /// Gradients are then reduced within the group and averaged over the replicas: PyTorch's HSDP
    /// (hybrid sharding).
    ///
    /// # Errors
    ///
    /// [`Error::Zero`] without replicas, [`Error::World`] if there are too many ranks.
    pub(crate) fn with_replicas(mut self, replicas: u64) -> Result<Self> {
        if replicas == 0 {
            return Err(Error::Zero { what: "the number of replicas" });
        }
        self.world_size = WorldSize::new(self.shard_group().as_u64().saturating_mul(replicas))?;
        Ok(self)
    }

    /// Keeps the given units gathered between forward and backward pass: PyTorch's
    /// `reshard_after_forward=False`.
    ///
    /// Each costs the memory of its parameters and saves one `all_gather`. The root unit stays
    /// gathered anyway.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownUnit`] if no parameter is in one of them.
    pub fn with_kept_units<U: Into<String>>(
        mut self,
        units: impl IntoIterator<Item = U>,
    ) -> Result<Self> {
        self.kept_units = units.into_iter().map(Into::into).collect();
        let known: BTreeSet<&str> = self.units().into_iter().chain([""]).collect();
        match self.kept_units.iter().find(|unit| !known.contains(unit.as_str())) {
            Some(unit) => Err(Error::UnknownUnit { unit: unit.clone() }),
            None => Ok(self),
        }
    }

    /// The plan for a shard group of another size that moves the fewest bytes.
    ///
    /// Every rank that stays keeps the first part of what it has, as much as fits its new share, so
    /// a rank may own several parts of a unit afterwards. Shares are as equal as before.
    /// [`Reshard`](crate::reshard::Reshard) tells what has to move.
    ///
    /// # Errors
    ///
    /// - [`CutError::NotResizable`] if a parameter is cut or owned in a way that fixes the part of
    ///   each rank: only [`Cut::Ragged`], [`Cut::Wrapped`], [`Cut::Replicated`] and [`Cut::Tied`]
    ///   can be resized;
    /// - [`Error::World`] or [`Error::TotalTooLarge`] if the new world, or the common multiple of
    ///   all sizes the plan has had, is too large.
    ///
    /// # Examples
    ///
    /// ```
    /// use core_types::{Placement, WorldSize};
    /// use fsdp_plan::{
    ///     ElemType, ParameterInfo,
    ///     strategy::{Full, Layout, ShardingStrategy},
    /// };
    ///
    /// let parameters = [ParameterInfo::new("fc.weight", [12, 4], ElemType::F32)?];
    /// let layout = Layout::RowRagged { rows: 1 };
    /// let four = Full::new(layout).plan(&parameters, WorldSize::new(4)?)?;
    /// let three = four.resized(WorldSize::new(3)?)?;
    ///
    /// // Rank 1 keeps its rows 3, 4 and 5, and gets one of the three that were rank 3's.
    /// let rows = three.shards(0, Placement::new(1, 3)?.rank())?;
    /// let rows: Vec<_> = rows.map(|shard| (shard.dim0_start, shard.dim0_rows)).collect();
    /// assert_eq!(rows, [(Some(3), Some(3)), (Some(10), Some(1))]);
    /// # Ok::<(), fsdp_plan::Error>(())
    /// ```
    pub fn resized(&self, group: WorldSize) -> Result<Self> {
        // A table of owners moves the least: 48 of 64 ranks keep 75 % of their bytes, 3 % without it.
        // Virtual parts, as in consistent hashing, would burden every plan that is never resized.
        let is_fixed = |cut| {
            !matches!(cut, Cut::Ragged { .. } | Cut::Wrapped { .. } | Cut::Replicated | Cut::Tied)
        };
        if let Some(parameter) = self.parameters.iter().find(|parameter| is_fixed(parameter.cut()))
        {
            return Err(Error::Cut(CutError::NotResizable {
                name: parameter.info().name().to_owned(),
            }));
        }
        Self { shares: self.shares.resized(group)?, ..self.clone() }.with_replicas(self.replicas())
    }

    /// The name of the strategy that made it.
    pub fn strategy(&self) -> &str {
        &self.strategy
    }

    /// The number of ranks it is made for.
    pub fn world_size(&self) -> WorldSize {
        self.world_size
    }

    /// The number of ranks over which one copy of the model is spread.
    pub fn shard_group(&self) -> WorldSize {
        self.shares.group()
    }

    /// The number of shard groups, all of which hold the same.
    pub fn replicas(&self) -> u64 {
        self.world_size.as_u64() / self.shard_group().as_u64()
    }

    /// Whether `unit` stays gathered between forward and backward pass.
    #[doc(hidden)]
    pub fn keeps_gathered(&self, unit: &str) -> bool {
        unit.is_empty() || self.kept_units.contains(unit)
    }

    /// Whether ranks hold what they kept from plans of other sizes, instead of equal parts in
    /// order.
    pub(crate) fn is_resized(&self) -> bool {
        self.shares.table().is_some()
    }

    /// The units, but for the root unit, in the order in which their parameters first occur.
    pub fn units(&self) -> Vec<&str> {
        let units =
            NamedGroups::of(self.parameters.iter().map(|parameter| parameter.info().unit()));
        units.names.into_iter().filter(|unit| !unit.is_empty()).collect()
    }

    /// Every parameter with its cut, in the order given.
    pub fn parameters(&self) -> &[PlannedParameter] {
        &self.parameters
    }

    /// The position of the parameter `name`.
    ///
    /// # Complexity
    ///
    /// Logarithmic in the number of parameters.
    #[doc(hidden)]
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.names.find(name, |position| self.parameters[position].info().name())
    }

    /// The parts of the parameter at `param_idx` that `rank` holds, in the order of its elements.
    ///
    /// One part, or none, unless the plan was [resized](Self::resized).
    ///
    /// # Errors
    ///
    /// [`Error::ParameterOutOfRange`] or [`Error::World`] if there is no such parameter or rank.
    pub fn shards(
        &self,
        param_idx: usize,
        rank: Rank,
    ) -> Result<impl Iterator<Item = ShardAssignment>> {
        if param_idx >= self.parameters.len() {
            return Err(Error::ParameterOutOfRange {
                index: param_idx,
                len: self.parameters.len(),
            });
        }
        Ok(ShardsOfRank::new(self, rank, param_idx..param_idx + 1)?.map(|(_, shard)| shard))
    }

    /// Every parameter that `rank` holds a part of, with that part, in the order given.
    ///
    /// # Complexity
    ///
    /// Linear in the number of parameters, whatever the world size.
    ///
    /// # Errors
    ///
    /// [`Error::World`] if there is no such rank.
    pub fn shards_of_rank(
        &self,
        rank: Rank,
    ) -> Result<impl Iterator<Item = (&PlannedParameter, ShardAssignment)>> {
        ShardsOfRank::new(self, rank, 0..self.parameters.len())
    }

    /// The elements of all parameters together, each counted once and tied ones not again.
    pub fn numel(&self) -> u128 {
        let held = self.parameters.iter().filter(|parameter| parameter.cut() != Cut::Tied);
        held.map(|parameter| u128::from(parameter.info().numel())).sum()
    }

    pub(crate) fn shares(&self) -> &Shares {
        &self.shares
    }
}
