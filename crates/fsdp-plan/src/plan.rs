//! The plan itself: ordered, validated, plain data with a format version.

use std::borrow::Cow;

use core_types::{Placement, Rank, WorldSize};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    Cut, ParameterInfo, ShardAssignment, check,
    error::{Error, Result},
};

/// The version of the serialized form of a [`ShardingPlan`]; it changes whenever that form does.
pub const FORMAT_VERSION: u32 = 1;

/// Who owns which part of every parameter.
///
/// Parameters keep the order in which they were given. A plan holds one [`Cut`] per parameter and nothing per rank, so
/// it is as small for 16,384 ranks as for two; [`shard`](Self::shard) computes a rank's part when it is asked for.
/// A plan that exists is valid: building and deserializing make the same checks.
///
/// # Examples
///
/// ```
/// use core_types::{Placement, WorldSize};
/// use fsdp_plan::{ElemType, Full, ParameterInfo, ShardingPlan, ShardingStrategy};
///
/// let parameters = [ParameterInfo::new("fc.weight", [10, 4], ElemType::F32)?];
/// let plan = Full::default().plan(&parameters, WorldSize::new(4)?)?;
///
/// let last = Placement::new(3, 4)?.rank();
/// let shard = plan.shard(0, last).unwrap();
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
    parameters: Vec<PlannedParameter>,
    /// Positions in `parameters`, sorted by name.
    by_name: Vec<usize>,
}

impl ShardingPlan {
    /// Builds a plan from the cuts that the strategy named `strategy` chose.
    ///
    /// # Errors
    ///
    /// - [`Error::NoParameters`] or [`Error::DuplicateName`];
    /// - [`Error::CutAlwaysGathered`] if a parameter that must be gathered always is not [`Cut::Replicated`];
    /// - [`Error::ScalarParameter`] if a parameter without dims is cut along dim 0;
    /// - [`Error::World`] if an owner is no rank of the world;
    /// - [`Error::MixedUnit`] or [`Error::BrokenUnit`] if the flat parameters of a unit, in the order given, differ in
    ///   dtype or in being trained, or do not lie side by side.
    pub fn new(strategy: impl Into<String>, world_size: WorldSize, parameters: Vec<PlannedParameter>) -> Result<Self> {
        let by_name = check::sorted_by_name(&parameters)?;
        check::cuts(&parameters, world_size)?;
        check::flat_units(&parameters)?;
        Ok(Self { strategy: strategy.into(), world_size, parameters, by_name })
    }

    /// The name of the strategy that made it.
    pub fn strategy(&self) -> &str {
        &self.strategy
    }

    /// The number of ranks it is made for.
    pub fn world_size(&self) -> WorldSize {
        self.world_size
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
    pub fn index_of(&self, name: &str) -> Option<usize> {
        let name_at = |&position: &usize| self.parameters[position].info.name();
        let found = self.by_name.binary_search_by(|position| name_at(position).cmp(name));
        found.ok().map(|found| self.by_name[found])
    }

    /// The part of the parameter at `param_idx` that `rank` holds.
    ///
    /// `None` if it holds nothing of it, or if there is no such parameter or rank.
    pub fn shard(&self, param_idx: usize, rank: Rank) -> Option<ShardAssignment> {
        let place = self.place(rank).ok()?;
        self.parameters.get(param_idx)?.shard(place)
    }

    /// Every parameter that `rank` holds a part of, with that part, in the order given.
    ///
    /// Empty if the world has no such rank.
    ///
    /// # Complexity
    ///
    /// Linear in the number of parameters, whatever the world size.
    pub fn shards_of_rank(&self, rank: Rank) -> impl Iterator<Item = (&PlannedParameter, ShardAssignment)> {
        let place = self.place(rank).ok();
        self.parameters.iter().filter_map(move |parameter| Some((parameter, parameter.shard(place?)?)))
    }

    /// The elements of all parameters together, each counted once.
    pub fn numel(&self) -> u128 {
        self.parameters.iter().map(|parameter| u128::from(parameter.info.numel())).sum()
    }

    /// `rank` checked against the world of this plan.
    pub(crate) fn place(&self, rank: Rank) -> Result<Placement> {
        Ok(Placement::new(rank.as_u64(), self.world_size.as_u64())?)
    }
}

/// A parameter and how it is cut.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PlannedParameter {
    #[serde(flatten)]
    info: ParameterInfo,
    cut: Cut,
}

impl PlannedParameter {
    /// Joins a parameter and its cut; [`ShardingPlan::new`] checks whether they go together.
    pub fn new(info: ParameterInfo, cut: Cut) -> Self {
        Self { info, cut }
    }

    /// The parameter.
    pub fn info(&self) -> &ParameterInfo {
        &self.info
    }

    /// How it is cut.
    pub fn cut(&self) -> Cut {
        self.cut
    }

    fn shard(&self, place: Placement) -> Option<ShardAssignment> {
        ShardAssignment::of(&self.info, self.cut, place)
    }
}

/// The serialized form of a plan, borrowed for writing and owned after reading.
#[derive(Serialize, Deserialize)]
struct Document<'a> {
    format_version: FormatVersion,
    world_size: WorldSize,
    strategy: Cow<'a, str>,
    parameters: Cow<'a, [PlannedParameter]>,
}

impl Serialize for ShardingPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let document = Document {
            format_version: FormatVersion,
            world_size: self.world_size,
            strategy: Cow::Borrowed(&self.strategy),
            parameters: Cow::Borrowed(&self.parameters),
        };
        document.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ShardingPlan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let document = Document::deserialize(deserializer)?;
        Self::new(document.strategy, document.world_size, document.parameters.into_owned()).map_err(de::Error::custom)
    }
}

/// Reads and writes [`FORMAT_VERSION`], and no other.
#[derive(Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
#[derive(Clone)]
struct FormatVersion;

impl TryFrom<u32> for FormatVersion {
    type Error = Error;

    fn try_from(found: u32) -> Result<Self> {
        if found == FORMAT_VERSION { Ok(Self) } else { Err(Error::FormatVersion { found }) }
    }
}

impl From<FormatVersion> for u32 {
    fn from(FormatVersion: FormatVersion) -> Self {
        FORMAT_VERSION
    }
}
