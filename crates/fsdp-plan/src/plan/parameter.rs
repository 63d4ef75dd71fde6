//! One parameter of a plan.

use serde::{Deserialize, Serialize};

use crate::{
    cut::{Cut, PreparedCut},
    param::ParameterInfo,
};

/// A parameter and its cut.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PlannedParameter {
    #[serde(flatten)]
    info: ParameterInfo,
    cut: Cut,
}

impl PlannedParameter {
    /// Combines a parameter with its cut; [`ShardingPlan::new`](crate::ShardingPlan::new) checks
    /// that they match.
    pub fn new(info: ParameterInfo, cut: Cut) -> Self {
        Self { info, cut }
    }

    /// Returns the parameter.
    pub fn info(&self) -> &ParameterInfo {
        &self.info
    }

    /// Returns the cut.
    pub fn cut(&self) -> Cut {
        self.cut
    }

    /// Returns the bytes that this parameter adds to one copy of the model: 0 if it is tied, because its
    /// tensor counts under the other name.
    pub(crate) fn unique_bytes(&self) -> u64 {
        if self.cut == Cut::Tied { 0 } else { self.info.bytes() }
    }

    /// Prepares the cut for computing parts.
    pub(crate) fn prepared_cut(&self) -> PreparedCut {
        PreparedCut::new(&self.info, self.cut)
    }
}
