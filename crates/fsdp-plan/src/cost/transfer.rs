//! Transfers of a step: single calls, and totals per kind of collective.

use serde::Serialize;

use super::fit;
use crate::{error::Result, plan::ShardingPlan};

/// One collective over several parameters or gradients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Transfer {
    /// Participating ranks.
    pub scope: TransferScope,
    /// Number of participating ranks. A transfer among one rank sends nothing.
    pub ranks: u64,
    /// Number of calls in a step.
    pub count: u64,
    /// Indices of the parameters in the plan, in order.
    pub parameters: Vec<usize>,
    /// Bytes of the full buffer per call, padding included if the runtime pads: the output of
    /// `all_gather`, the input of `reduce_scatter`, and the largest contribution to an
    /// `all_reduce`.
    pub bytes: u64,
    /// Like `bytes`, without padding: the bytes that a runtime with unequal parts sends.
    pub payload_bytes: u64,
    /// Part of `bytes` on the rank with the smallest part, which receives the most.
    #[serde(skip)]
    pub(super) smallest_part_bytes: u64,
}

/// The ranks that take part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TransferScope {
    /// The neighboring ranks of a shard group.
    ShardGroup,
    /// The ranks with the same parts: one of each shard group.
    Replicas,
    /// All ranks.
    World,
}

/// The kind of a collective.
#[derive(Clone, Copy, Debug)]
pub(super) enum CollectiveKind {
    /// The parts of all ranks go to every rank.
    AllGather,
    /// Sums go to the ranks that own them.
    ReduceScatter,
    /// Sums go to every rank.
    AllReduce,
}

impl Transfer {
    /// Returns true if anything is sent, that is, among more than one rank.
    pub(super) fn is_sent(&self) -> bool {
        self.ranks > 1
    }
}

impl TransferScope {
    /// Returns the number of participating ranks.
    pub(super) fn ranks(self, plan: &ShardingPlan) -> u64 {
        match self {
            Self::ShardGroup => plan.shard_group().as_u64(),
            Self::Replicas => plan.replicas(),
            Self::World => plan.world_size().as_u64(),
        }
    }
}

/// The calls and bytes of one kind of collective in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct CollectiveTraffic {
    /// Number of calls.
    pub count: u64,
    /// Bytes of the full buffers of all calls, padding included: the output of `all_gather` and the
    /// input of `reduce_scatter`.
    pub bytes: u64,
    /// Like `bytes`, without padding: the bytes that runtimes with unequal parts send, such as
    /// dist-train.
    pub payload_bytes: u64,
}

/// The collectives of one step, that is, one forward and one backward pass, on one rank.
///
/// The counts are the totals of the [`Schedule`](super::Schedule). Units are gathered before the
/// forward pass and again before the backward pass, because they are freed in between; only the
/// root unit and [kept units](crate::ShardingPlan::with_kept_units) stay, as in PyTorch's
/// `fully_shard`. Gradients are reduced once per unit. Parameters that one rank owns whole are part
/// of the same calls as cut ones. Parameters that every rank keeps whole need one `all_reduce` of
/// their gradients per unit, over all ranks. If the model itself has several copies (HSDP), a further
/// `all_reduce` per unit averages the scattered gradients over the copies. A world of one rank sends
/// nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Collectives {
    /// Parameters, gathered on every rank of the shard group.
    pub all_gather: CollectiveTraffic,
    /// Gradients, summed on their owners.
    pub reduce_scatter: CollectiveTraffic,
    /// Gradients of replicated parameters, and all other gradients over the replicas.
    pub all_reduce: CollectiveTraffic,
}

impl CollectiveTraffic {
    /// Adds the calls of a transfer.
    pub(super) fn add(&mut self, transfer: &Transfer) -> Result<()> {
        let count = transfer.count;
        self.count += count;
        self.bytes = add_calls(self.bytes, count, transfer.bytes.into())?;
        self.payload_bytes = add_calls(self.payload_bytes, count, transfer.payload_bytes.into())?;
        Ok(())
    }
}

/// Returns `total` plus the bytes of `count` calls.
pub(super) fn add_calls(total: u64, count: u64, bytes_per_call: u128) -> Result<u64> {
    fit(u128::from(total) + u128::from(count) * bytes_per_call, "the bytes sent in a step")
}
