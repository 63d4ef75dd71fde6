//! Sessions of a run.

use serde::{Deserialize, Serialize};

use crate::cost::{sharding::Sharding, traffic::StepTraffic};

/// The computer and the devices of a run from its start, or from where it was resumed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Number of steps before it.
    pub first_step: u64,
    /// Number of devices.
    pub world_size: u64,
    /// Number of devices of the first process.
    pub devices_here: u64,
    /// Whether the devices are processors, which use the memory of the process.
    pub on_processors: bool,
    /// Sharding of the model, or `None` if every device had all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharding: Option<Sharding>,
    /// Memory of the process before training, if the system reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_bytes: Option<u64>,
    /// Collectives of the first device in the last step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_traffic: Option<StepTraffic>,
    /// Peak memory of the process, if the session ended in order and the system reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
}
