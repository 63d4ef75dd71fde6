//! Costs of a run: memory, and bytes sent, predicted and measured.

pub(crate) mod limits;
pub(crate) mod memory;
pub(crate) mod sharding;
pub(crate) mod traffic;

pub use self::{
    limits::{MemoryLimit, machine_bytes, system_limits},
    memory::{MemoryPrediction, Workload},
    sharding::{Keep, ModelBytes, RunPlan, Sharding, Strategy},
    traffic::{CollectiveCalls, StepTraffic},
};
