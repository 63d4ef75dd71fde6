//! The serialized form of a plan.

use std::borrow::Cow;

use core_types::WorldSize;
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, IgnoredAny},
};

use super::{PlannedParameter, ShardingPlan};
use crate::{
    error::{Error, Result},
    format::FORMAT_VERSION,
};

/// The serialized form of a plan, borrowed for writing and owned after reading.
#[derive(Serialize, Deserialize)]
struct PlanDocument<'a> {
    format_version: FormatVersion,
    world_size: WorldSize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replicas: Option<u64>,
    strategy: Cow<'a, str>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    kept_units: Vec<Cow<'a, str>>,
    /// Parts of unequal size. Plans have none, and one that lists them is refused instead of read as
    /// equal parts.
    #[serde(default, skip_serializing)]
    shares: Option<IgnoredAny>,
    parameters: Cow<'a, [PlannedParameter]>,
}

impl Serialize for ShardingPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let document = PlanDocument {
            format_version: FormatVersion,
            world_size: self.world_size,
            replicas: Some(self.replicas()).filter(|&replicas| replicas > 1),
            strategy: Cow::Borrowed(&self.strategy),
            kept_units: self.kept_units.iter().map(|unit| Cow::Borrowed(unit.as_str())).collect(),
            shares: None,
            parameters: Cow::Borrowed(&self.parameters),
        };
        document.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ShardingPlan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let document = PlanDocument::deserialize(deserializer)?;
        if document.shares.is_some() {
            return Err(de::Error::custom("a plan with unequal `shares` is not supported"));
        }
        document.into_plan().map_err(de::Error::custom)
    }
}

impl PlanDocument<'_> {
    fn into_plan(self) -> Result<ShardingPlan> {
        let world_size = self.world_size.as_u64();
        let replicas = self.replicas.unwrap_or(1);
        if replicas == 0 || !world_size.is_multiple_of(replicas) {
            return Err(Error::ReplicaMismatch { world_size, replicas });
        }
        let group = WorldSize::new(world_size / replicas)?;
        let plan = ShardingPlan::new(self.strategy, group, self.parameters.into_owned())?;
        plan.with_replicas(replicas)?.with_kept_units(self.kept_units)
    }
}

/// Serializes as [`FORMAT_VERSION`] and rejects every other version.
#[derive(Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
#[derive(Clone)]
struct FormatVersion;

impl TryFrom<u32> for FormatVersion {
    type Error = Error;

    fn try_from(found: u32) -> Result<Self> {
        if found == FORMAT_VERSION { Ok(Self) } else { Err(Error::UnsupportedFormat { found }) }
    }
}

impl From<FormatVersion> for u32 {
    fn from(FormatVersion: FormatVersion) -> Self {
        FORMAT_VERSION
    }
}
