//! What travels in a step, and when: the schedule of PyTorch's `fully_shard` as data.
//!
//! The parameters of a [`Message`] are gathered on all ranks of a shard group before they are
//! needed, and their gradients are reduced to the owners afterwards; [`Message::collectives`] says
//! by which calls. What a step costs is a fold over these.

use crate::plan::ShardingPlan;

/// How parameters travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Each rank holds a part: all-gather and reduce-scatter.
    Sharded,
    /// Some ranks hold whole parts: broadcast and reduce.
    Owned,
    /// Each rank holds a copy: only gradients travel, by all-reduce.
    Replicated,
}

/// Parameters that travel together: those of a unit, or of a layer that is kept whole.
#[derive(Clone, Debug)]
pub(super) struct Message<'a> {
    pub(super) kind: Kind,
    pub(super) unit: &'a str,
    /// The number of calls: one, or one for each owner.
    pub(super) calls: u64,
    /// The whole buffer of parameters, padding included.
    pub(super) gather_bytes: u128,
    /// The whole buffer of gradients, padding included.
    pub(super) reduce_bytes: u128,
    /// The last member that was counted as an owner.
    pub(super) last_owner: Option<u64>,
}

/// A kind of collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast,
    Reduce,
}

/// The ranks that take part in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// A shard group: neighbors.
    Group,
    /// Ranks that hold the same part: one of each shard group.
    Replicas,
    /// All ranks.
    World,
}

/// Some calls of one kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Calls {
    pub(super) operation: Operation,
    pub(super) scope: Scope,
    /// The number of calls.
    pub(super) count: u64,
    /// The bytes of all calls together.
    pub(super) bytes: u128,
}

impl Message<'_> {
    /// The calls that gather the parameters, reduce their gradients, and average these over the
    /// replicas; without those that send nothing or have one rank.
    pub(super) fn collectives(&self, plan: &ShardingPlan) -> impl Iterator<Item = Calls> {
        let group = u128::from(plan.shard_group().as_u64());
        let calls = match self.kind {
            Kind::Sharded => vec![
                self.gather(Operation::AllGather, plan),
                self.reduce(Operation::ReduceScatter),
                self.average(self.reduce_bytes / group),
            ],
            Kind::Owned => vec![
                self.gather(Operation::Broadcast, plan),
                self.reduce(Operation::Reduce),
                self.average(self.reduce_bytes),
            ],
            Kind::Replicated => {
                vec![self.once(Operation::AllReduce, Scope::World, self.reduce_bytes)]
            }
        };
        calls.into_iter().filter(|calls| calls.bytes > 0 && calls.scope.size(plan) > 1)
    }

    /// Parameters are gathered for the forward pass, and again for the backward pass unless they
    /// stay.
    fn gather(&self, operation: Operation, plan: &ShardingPlan) -> Calls {
        let once = self.once(operation, Scope::Group, self.gather_bytes);
        let times = if plan.keeps_gathered(self.unit) { 1 } else { 2 };
        Calls { count: once.count * times, bytes: once.bytes * u128::from(times), ..once }
    }

    fn reduce(&self, operation: Operation) -> Calls {
        self.once(operation, Scope::Group, self.reduce_bytes)
    }

    fn average(&self, bytes: u128) -> Calls {
        self.once(Operation::AllReduce, Scope::Replicas, bytes)
    }

    fn once(&self, operation: Operation, scope: Scope, bytes: u128) -> Calls {
        Calls { operation, scope, count: self.calls, bytes }
    }
}

impl Scope {
    /// The number of ranks that take part.
    pub(super) fn size(self, plan: &ShardingPlan) -> u64 {
        match self {
            Self::Group => plan.shard_group().as_u64(),
            Self::Replicas => plan.replicas(),
            Self::World => plan.world_size().as_u64(),
        }
    }
}
