//! One stretch of a run, from its start or from where it was resumed.

use serde::{Deserialize, Serialize};

use crate::train::{sharding::Sharding, traffic::StepTraffic};

/// Where a stretch of a run was computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Session {
    /// How many steps were done before it.
    pub(crate) first_step: u64,
    pub(crate) world_size: u64,
    /// How many of these devices belong to the process that writes this.
    pub(crate) devices_here: u64,
    /// Whether they were processors, whose memory is that of the process.
    pub(crate) on_processors: bool,
    /// How the model was sharded; every device had all of it if this is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sharding: Option<Sharding>,
    /// What the process took before training, if the system reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base_bytes: Option<u64>,
    /// What the first device handed over in the last step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) step_traffic: Option<StepTraffic>,
    /// The peak memory of the process, if the session ended in order and the system reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peak_bytes: Option<u64>,
}
