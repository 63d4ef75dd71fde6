//! The axes of a mesh along which a plan cuts parameters, and along which it repeats them.

use fsdp_plan::ShardingPlan;
use pmap_mesh::{ALL, DeviceMesh, MeshAxes};

use crate::error::sharding::ShardingError;

/// How a plan lies on a mesh.
#[derive(Clone, Debug)]
pub(super) struct PlanAxes {
    /// The axes along which a parameter is cut.
    pub(super) shard: MeshAxes,
    /// The axes along which its parts are repeated, if they are.
    pub(super) replica: Option<MeshAxes>,
}

/// Finds the axes for a plan, which must be one for as many ranks as the mesh has slots.
pub(super) fn of_plan(mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<PlanAxes, ShardingError> {
    let ranks = plan.world_size().as_u64();
    if ranks != mesh.len() as u64 {
        return Err(ShardingError::World { ranks, slots: mesh.len() });
    }
    if plan.replicas() == 1 {
        return Ok(PlanAxes { shard: ALL, replica: None });
    }
    let axes: Vec<(&str, usize)> = mesh.axes().collect();
    let group = plan.shard_group().as_u64();
    match axes.split_last() {
        Some((&(shard, size), replicas)) if size as u64 == group => {
            let names = replicas.iter().map(|(name, _)| (*name).to_owned());
            Ok(PlanAxes { shard: shard.into(), replica: Some(names.collect()) })
        }
        _ => Err(ShardingError::Replicas { group, replicas: plan.replicas() }),
    }
}
