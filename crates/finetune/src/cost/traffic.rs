//! Bytes that a device sends in the collectives of a step.

use fsdp_plan::support::{self, HandedOver};
use pmap_mesh::{
    DeviceMesh,
    support::{Tally, Traffic},
};
use serde::{Deserialize, Serialize};

/// The calls of a collective by one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CollectiveCalls {
    /// Number of calls.
    pub calls: u64,
    /// Bytes that the device contributes.
    pub bytes: u64,
}

/// The collectives of a step on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepTraffic {
    /// Gathers of parameters.
    pub all_gather: CollectiveCalls,
    /// Sums of gradients, with one shard per device.
    pub reduce_scatter: CollectiveCalls,
    /// Sums on all devices.
    pub all_reduce: CollectiveCalls,
    /// All other collectives.
    pub others: CollectiveCalls,
}

impl StepTraffic {
    /// Returns the total traffic of this process's first device so far.
    pub(crate) fn so_far(mesh: &DeviceMesh) -> Traffic {
        // Every process of a mesh has at least one device.
        mesh.traffic()[0]
    }

    /// Returns the traffic of this process's first device since its total was `before`.
    pub(crate) fn since(mesh: &DeviceMesh, before: Traffic) -> Self {
        let step = Self::so_far(mesh) - before;
        let other_tallies =
            [step.reduce, step.all_to_all, step.ppermute, step.broadcast, step.barrier];
        let calls = |tally: Tally| CollectiveCalls { calls: tally.calls, bytes: tally.bytes };
        let mut others = CollectiveCalls::default();
        for tally in other_tallies {
            others.calls += tally.calls;
            others.bytes += tally.bytes;
        }
        Self {
            all_gather: calls(step.all_gather),
            reduce_scatter: calls(step.reduce_scatter),
            all_reduce: calls(step.all_reduce),
            others,
        }
    }

    /// Returns the calls of each kind of collective, with its name.
    pub fn kinds(self) -> [(&'static str, CollectiveCalls); 4] {
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
        let calls = |support::Calls { count, bytes, .. }| CollectiveCalls { calls: count, bytes };
        Self {
            all_gather: calls(planned.all_gather),
            reduce_scatter: calls(planned.reduce_scatter),
            all_reduce: calls(planned.all_reduce),
            others: CollectiveCalls::default(),
        }
    }
}
