//! Sharding plans: ordered, validated data with a format version.

mod check;
mod document;
mod parameter;
mod shards;

use std::collections::BTreeSet;

use core_types::{Rank, WorldSize};

pub use self::parameter::PlannedParameter;
pub(crate) use self::shards::ShardsOfRank;
use crate::{
    cut::{Cut, ShardAssignment},
    error::{Error, Result},
    param::{groups::NamedGroups, name_index::NameIndex},
};

/// An assignment of every part of every parameter to a rank.
///
/// Parameters keep the order in which they were given. A plan stores one [`Cut`] per parameter and
/// nothing per rank, so it is as small for 16,384 ranks as for two; [`shard`](Self::shard)
/// computes the part of a rank on demand. A plan is always valid: the constructor and the deserializer make the same checks.
///
/// Ranks form **replicas** of one **shard group** each: ranks `0..group` are the first replica, and
/// so on, like the mesh `(replicate, shard)` of PyTorch's HSDP. A cut divides a parameter over one
/// group, and all replicas hold the same data. There is one replica unless
/// [`Hsdp`](crate::strategy::Hsdp) makes several.
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
/// let shard = plan.shard(0, last)?.unwrap();
/// assert_eq!((shard.start_offset, shard.shard_size), (36, 4)); // ranks own 3, 3, 3 and 1 rows
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
    shard_group: WorldSize,
    /// Units that stay gathered between forward and backward pass, without the root unit.
    kept_units: BTreeSet<String>,
    parameters: Vec<PlannedParameter>,
    names: NameIndex,
}

impl ShardingPlan {
    /// Builds a plan from cuts; `strategy` is the name of the strategy that chose them.
    ///
    /// # Errors
    ///
    /// - [`Error::NoParameters`], or [`Error::InvalidParameter`] if two have one name;
    /// - [`Error::InvalidCut`] if a parameter that must always be gathered is not [`Cut::Replicated`], if a
    ///   tied parameter is not [`Cut::Tied`], or if an untied one is;
    /// - [`Error::InvalidParameter`] if the target of a tied parameter does not exist, is tied
    ///   to another parameter, or differs in shape, dtype or unit;
    /// - [`Error::Scalar`] if a parameter without dims is cut along dim 0, [`Error::InvalidCut`] if a cut
    ///   would split a block of a dtype;
    /// - [`Error::World`] if an owner is not a rank of the world;
    /// - [`Error::InvalidCut`] if parameters of a flat buffer differ in dtype or in `requires_grad`, or if
    ///   parameters of a buffer are not contiguous in the order given.
    pub fn new(
        strategy: impl Into<String>,
        world_size: WorldSize,
        parameters: Vec<PlannedParameter>,
    ) -> Result<Self> {
        if parameters.is_empty() {
            return Err(Error::NoParameters);
        }
        let info = |position: usize| parameters[position].info();
        let names = NameIndex::new(parameters.len(), |position| {
            (info(position).name_hash(), info(position).name())
        })
        .map_err(|duplicate| Error::listed_twice(info(duplicate).name()))?;
        check::check_cuts(&parameters, world_size)?;
        check::check_ties(&parameters, |wanted| {
            let position = names.find(wanted, |position| info(position).name())?;
            Some(&parameters[position])
        })?;
        check::check_buffers(&parameters)?;
        Ok(Self {
            strategy: strategy.into(),
            world_size,
            shard_group: world_size,
            kept_units: BTreeSet::new(),
            parameters,
            names,
        })
    }

    /// Repeats the shard group `replicas` times; each group holds the full model.
    ///
    /// Gradients are reduced within the group and averaged over the replicas, as in PyTorch's HSDP
    /// (hybrid sharding).
    ///
    /// # Errors
    ///
    /// [`Error::Zero`] for zero replicas, [`Error::World`] for too many ranks.
    pub(crate) fn with_replicas(mut self, replicas: u64) -> Result<Self> {
        if replicas == 0 {
            return Err(Error::Zero { what: "the number of replicas" });
        }
        self.world_size = WorldSize::new(self.shard_group().as_u64().saturating_mul(replicas))?;
        Ok(self)
    }

    /// Keeps the given units gathered between forward and backward pass, like PyTorch's
    /// `reshard_after_forward=False`.
    ///
    /// Each unit costs the memory of its parameters and saves one `all_gather`. The root unit
    /// always stays gathered.
    ///
    /// # Errors
    ///
    /// [`Error::Unknown`] for a unit without parameters.
    pub fn with_kept_units<U: Into<String>>(
        mut self,
        units: impl IntoIterator<Item = U>,
    ) -> Result<Self> {
        self.kept_units = units.into_iter().map(Into::into).collect();
        let known: BTreeSet<&str> = self.units().into_iter().chain([""]).collect();
        match self.kept_units.iter().find(|unit| !known.contains(unit.as_str())) {
            Some(unit) => Err(Error::Unknown { what: "unit", name: unit.clone() }),
            None => Ok(self),
        }
    }

    /// Returns the name of the strategy that made the plan.
    pub fn strategy(&self) -> &str {
        &self.strategy
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> WorldSize {
        self.world_size
    }

    /// Returns the number of ranks that share one copy of the model.
    pub fn shard_group(&self) -> WorldSize {
        self.shard_group
    }

    /// Returns the number of shard groups, each with a full copy of the model.
    pub fn replicas(&self) -> u64 {
        self.world_size.as_u64() / self.shard_group().as_u64()
    }

    /// Returns true if `unit` stays gathered between forward and backward pass.
    #[doc(hidden)]
    pub fn keeps_gathered(&self, unit: &str) -> bool {
        unit.is_empty() || self.kept_units.contains(unit)
    }

    /// Returns the names of the units in order of first occurrence, without the root unit.
    pub fn units(&self) -> Vec<&str> {
        let units = NamedGroups::from_names(
            self.parameters.iter().map(|parameter| parameter.info().unit()),
        );
        units.names.into_iter().filter(|unit| !unit.is_empty()).collect()
    }

    /// Returns the parameters with their cuts, in the order given.
    pub fn parameters(&self) -> &[PlannedParameter] {
        &self.parameters
    }

    /// Returns the index of the parameter `name`.
    ///
    /// # Complexity
    ///
    /// Logarithmic in the number of parameters.
    #[doc(hidden)]
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.names.find(name, |position| self.parameters[position].info().name())
    }

    /// Returns the part of the parameter at `param_idx` that `rank` holds, or `None` if it holds
    /// nothing of it.
    ///
    /// # Errors
    ///
    /// [`Error::Unknown`] or [`Error::World`] for an unknown parameter or rank.
    pub fn shard(&self, param_idx: usize, rank: Rank) -> Result<Option<ShardAssignment>> {
        if param_idx >= self.parameters.len() {
            return Err(Error::unknown_index(param_idx, self.parameters.len()));
        }
        let mut shards = ShardsOfRank::new(self, rank, param_idx..param_idx + 1)?;
        Ok(shards.next_shard().map(|(_, shard)| shard))
    }

    /// Returns the parts that `rank` holds, each with its parameter, in the order of the
    /// parameters.
    ///
    /// # Complexity
    ///
    /// Linear in the number of parameters, independent of the world size.
    ///
    /// # Errors
    ///
    /// [`Error::World`] for an unknown rank.
    pub fn shards_of_rank(
        &self,
        rank: Rank,
    ) -> Result<impl Iterator<Item = (&PlannedParameter, ShardAssignment)>> {
        ShardsOfRank::new(self, rank, 0..self.parameters.len())
    }

    /// Returns the total number of elements; tied parameters count once.
    #[doc(hidden)]
    pub fn numel(&self) -> u128 {
        let untied = self.parameters.iter().filter(|parameter| parameter.cut() != Cut::Tied);
        untied.map(|parameter| u128::from(parameter.info().numel())).sum()
    }
}
