//! The mesh axes over which a plan shards and replicates parameters.

use fsdp_plan::ShardingPlan;
use pmap_mesh::{ALL, DeviceMesh, MeshAxes};

use crate::error::{Error, Result};

/// The mesh axes of a plan.
#[derive(Clone, Debug)]
pub(super) struct PlanAxes {
    /// The axes over which a parameter is sharded.
    pub(super) shard: MeshAxes,
    /// The axes over which the shards are replicated, if any.
    pub(super) replica: Option<MeshAxes>,
}

/// Returns the mesh axes of a plan, which must have one rank per slot of the mesh.
pub(super) fn for_plan(mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<PlanAxes> {
    let ranks = plan.world_size().as_u64();
    if ranks != mesh.len() as u64 {
        let slots = mesh.len();
        let reason = format_args!("it is for {ranks} ranks, but the mesh has {slots} slots");
        return Err(Error::plan_mismatch(reason));
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
        _ => Err(Error::plan_mismatch(format_args!(
            "{} replicas of {group} ranks need a mesh of several axes, the last of size {group}",
            plan.replicas()
        ))),
    }
}
