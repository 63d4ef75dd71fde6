//! Sessions of a run.

use serde::{Deserialize, Serialize};

use crate::cost::{sharding::Sharding, traffic::StepTraffic};

/// The devices and costs of a run between a start and a stop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Number of steps before the session.
    pub first_step: u64,
    /// Number of devices.
    pub world_size: u64,
    /// Number of devices of the first process.
    pub devices_here: u64,
    /// Whether the devices are CPU devices, which use the memory of the process.
    pub on_processors: bool,
    /// Sharding of the model, or `None` if every device had the whole model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharding: Option<Sharding>,
    /// Memory of the process before training, if the system reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_bytes: Option<u64>,
    /// Collectives of the first device in the last step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_traffic: Option<StepTraffic>,
    /// Peak memory of the process, if the session ended cleanly and the system reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
}
