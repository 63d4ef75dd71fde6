//! What a device hands over in the collectives of a step.

use candle_distributed::{
    mesh::{
        DeviceMesh,
        support::{Tally, Traffic},
    },
    plan::support::{self, HandedOver},
};
use serde::{Deserialize, Serialize};

/// How often a device called collectives in a step, and with how many bytes of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Calls {
    pub(crate) calls: u64,
    pub(crate) bytes: u64,
}

/// The collectives of a step, as one device called them: those that a plan has, and all others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StepTraffic {
    pub(crate) all_gather: Calls,
    pub(crate) reduce_scatter: Calls,
    pub(crate) all_reduce: Calls,
    pub(crate) others: Calls,
}

impl StepTraffic {
    /// What the first device of this process has handed over so far.
    pub(crate) fn so_far(mesh: &DeviceMesh) -> Traffic {
        // A process of a mesh has a device.
        mesh.traffic()[0]
    }

    /// What it has handed over since.
    pub(crate) fn since(mesh: &DeviceMesh, before: Traffic) -> Self {
        let step = Self::so_far(mesh) - before;
        let others = [step.reduce, step.all_to_all, step.ppermute, step.broadcast, step.barrier];
        let calls = |tally: Tally| Calls { calls: tally.calls, bytes: tally.bytes };
        let add = |sum: Calls, tally: Tally| Calls {
            calls: sum.calls + tally.calls,
            bytes: sum.bytes + tally.bytes,
        };
        Self {
            all_gather: calls(step.all_gather),
            reduce_scatter: calls(step.reduce_scatter),
            all_reduce: calls(step.all_reduce),
            others: others.into_iter().fold(Calls::default(), add),
        }
    }

    /// With the names of the kinds.
    pub(crate) fn kinds(self) -> [(&'static str, Calls); 4] {
        [
            ("all_gather", self.all_gather),
            ("reduce_scatter", self.reduce_scatter),
            ("all_reduce", self.all_reduce),
            ("others", self.others),
        ]
    }
}

impl From<HandedOver> for StepTraffic {
    fn from(planned: HandedOver) -> Self {
        let calls = |support::Calls { count, bytes, .. }| Calls { calls: count, bytes };
        Self {
            all_gather: calls(planned.all_gather),
            reduce_scatter: calls(planned.reduce_scatter),
            all_reduce: calls(planned.all_reduce),
            others: Calls::default(),
        }
    }
}
