//! One parameter of a plan.

use serde::{Deserialize, Serialize};

use crate::{
    cut::{Cut, Division},
    param::ParameterInfo,
};

/// A parameter and how it is cut.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PlannedParameter {
    #[serde(flatten)]
    info: ParameterInfo,
    cut: Cut,
}

impl PlannedParameter {
    /// Joins a parameter and its cut; [`ShardingPlan::new`](crate::ShardingPlan::new) checks
    /// whether they go together.
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

    /// The bytes that are held under this name by all ranks of a shard group together, copies
    /// counted once.
    pub(crate) fn held_bytes(&self) -> u64 {
        if self.cut == Cut::Tied { 0 } else { self.info.bytes() }
    }

    /// The cut, ready to compute parts.
    pub(crate) fn division(&self) -> Division {
        Division::of(&self.info, self.cut)
    }
}
