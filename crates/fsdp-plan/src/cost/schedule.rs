//! What travels in a step, and when: the schedule of PyTorch's `fully_shard` as data.
//!
//! Each [`Message`] is brought to all ranks of a shard group before it is needed, and its gradients
//! are taken to their owners afterwards; [`calls`] says by which collectives. What a step costs is
//! a fold over them.

use crate::plan::ShardingPlan;

/// How parameters travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Everyone sends a part to everyone.
    Sharded,
    /// Owners send to everyone.
    Owned,
    /// Everyone has a copy, and only gradients travel.
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

/// Some calls of one kind, with the bytes of each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Calls {
    pub(super) operation: Operation,
    pub(super) scope: Scope,
    pub(super) count: u64,
    /// Bytes of all calls.
    pub(super) bytes: u128,
}

/// The calls that bring the parameters of `message` and take their gradients away.
pub(super) fn calls(plan: &ShardingPlan, message: &Message<'_>) -> Vec<Calls> {
    let group = u128::from(plan.shard_group().as_u64());
    let gathers = if plan.keeps_gathered(message.unit) { 1 } else { 2 };
    let call = |operation, scope, times: u64, bytes| {
        let count = message.calls * times;
        Calls { operation, scope, count, bytes: bytes * u128::from(times) }
    };
    let gather = |operation| call(operation, Scope::Group, gathers, message.gather_bytes);
    let reduce = |operation| call(operation, Scope::Group, 1, message.reduce_bytes);
    let average = |bytes| call(Operation::AllReduce, Scope::Replicas, 1, bytes);
    let calls = match message.kind {
        Kind::Sharded => {
            vec![
                gather(Operation::AllGather),
                reduce(Operation::ReduceScatter),
                average(message.reduce_bytes / group),
            ]
        }
        Kind::Owned => vec![
            gather(Operation::Broadcast),
            reduce(Operation::Reduce),
            average(message.reduce_bytes),
        ],
        Kind::Replicated => vec![call(Operation::AllReduce, Scope::World, 1, message.reduce_bytes)],
    };
    calls.into_iter().filter(|calls| calls.bytes > 0 && calls.scope.size(plan) > 1).collect()
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
