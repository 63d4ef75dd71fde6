//! Hybrid sharding (HSDP): several copies of a sharded model.

use core_types::WorldSize;

use super::ShardingStrategy;
use crate::{
    error::{Error, Result},
    param::ParameterInfo,
    plan::ShardingPlan,
};

/// Shards the model over groups of neighboring ranks and replicates it over the groups, like
/// PyTorch's `HYBRID_SHARD`.
///
/// Parameters are gathered only within a group, usually a node with fast links, and gradients are
/// averaged over the groups. A rank needs as much memory as in a world of one group.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     ElemType, ParameterInfo,
///     strategy::{Full, Hsdp, ShardingStrategy},
/// };
///
/// let parameters = [ParameterInfo::new("fc.weight", [8, 4], ElemType::F32)?];
/// let plan = Hsdp::new(Full::default(), 2).plan(&parameters, WorldSize::new(8)?)?;
/// assert_eq!((plan.shard_group().as_u64(), plan.replicas()), (4, 2));
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "HYBRID_SHARD")]
pub struct Hsdp<S> {
    inner: S,
    replicas: u64,
}

impl<S: ShardingStrategy> Hsdp<S> {
    /// Creates a strategy with `replicas` groups, each planned by `inner`.
    pub fn new(inner: S, replicas: u64) -> Self {
        Self { inner, replicas }
    }
}

impl<S: ShardingStrategy> ShardingStrategy for Hsdp<S> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
        let world_size = world_size.as_u64();
        let replicas = self.replicas;
        match world_size.checked_div(replicas) {
            Some(group) if group * replicas == world_size => {
                self.inner.plan(parameters, WorldSize::new(group)?)?.with_replicas(replicas)
            }
            _ => Err(Error::ReplicaMismatch { world_size, replicas }),
        }
    }
}
