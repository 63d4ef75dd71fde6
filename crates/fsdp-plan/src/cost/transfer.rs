//! What travels in a step: one call, and the sums of each kind of collective.

use serde::Serialize;

use super::fit;
use crate::{error::Result, plan::ShardingPlan};

/// A collective of several parameters, or of their gradients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Transfer {
    /// Which ranks take part.
    pub scope: Scope,
    /// How many they are. A transfer among one sends nothing.
    pub ranks: u64,
    /// How often it is carried out in a step.
    pub count: u64,
    /// The positions of its parameters in the plan, in the order given.
    pub parameters: Vec<usize>,
    /// The bytes of the whole buffer each time, padding included if the runtime pads: what
    /// `all_gather` puts out, what `reduce_scatter` takes in, and what the rank that has the most
    /// adds to an `all_reduce`.
    pub bytes: u64,
    /// The same without padding: what is sent where parts of unequal sizes are.
    pub payload_bytes: u64,
    /// How much of `bytes` the rank with the smallest part has already: it receives the most.
    #[serde(skip)]
    pub(super) smallest_part_bytes: u64,
}

/// Ranks that take part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Scope {
    /// A shard group: neighbors.
    ShardGroup,
    /// Ranks that hold the same parts: one of each shard group.
    Replicas,
    /// All ranks.
    World,
}

/// A kind of collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Collective {
    /// Everyone's parts, to everyone.
    AllGather,
    /// Sums, to each rank those of its parts.
    ReduceScatter,
    /// Sums, to everyone.
    AllReduce,
}

impl Transfer {
    /// Whether anything is sent: not among a single rank.
    pub fn is_sent(&self) -> bool {
        self.ranks > 1
    }
}

impl Scope {
    pub(super) fn ranks(self, plan: &ShardingPlan) -> u64 {
        match self {
            Self::ShardGroup => plan.shard_group().as_u64(),
            Self::Replicas => plan.replicas(),
            Self::World => plan.world_size().as_u64(),
        }
    }
}

pub(super) const IN_A_STEP: &str = "the bytes sent in a step";

/// How often one kind of collective runs in a step, and how much it moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Traffic {
    /// The number of calls.
    pub count: u64,
    /// The bytes of the whole buffer, padding included, over all calls: what `all_gather` puts out,
    /// and what `reduce_scatter` takes in.
    pub bytes: u64,
    /// The same without padding: what travels where ranks send parts of unequal sizes, as
    /// dist-train's do.
    pub payload_bytes: u64,
}

/// The collectives of one step, one forward and one backward pass, as one rank takes part in them.
///
/// They are the [`Schedule`](super::Schedule) added up. Units are gathered before the forward pass,
/// and again before the backward pass because they are freed in between; only the root unit and
/// [kept units](crate::ShardingPlan::with_kept_units) stay, as in PyTorch's `fully_shard`. Gradients
/// are reduced once per unit. Layers and tensors that one rank owns whole travel in the same calls
/// as those that are cut. Gradients of replicated parameters are averaged by one `all_reduce` per
/// unit; with several replicas, so is each rank's part of the reduced gradients, over the ranks that
/// hold the same part. A world of one rank sends nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Collectives {
    /// Parameters, to every rank of the shard group.
    pub all_gather: Traffic,
    /// Gradients, to their owners.
    pub reduce_scatter: Traffic,
    /// Gradients of replicated parameters, and of all others over the replicas.
    pub all_reduce: Traffic,
}

impl Traffic {
    pub(super) fn add(&mut self, transfer: &Transfer) -> Result<()> {
        let sum = |bytes: u64, each: u64| {
            fit(u128::from(bytes) + u128::from(transfer.count) * u128::from(each), IN_A_STEP)
        };
        *self = Self {
            count: self.count + transfer.count,
            bytes: sum(self.bytes, transfer.bytes)?,
            payload_bytes: sum(self.payload_bytes, transfer.payload_bytes)?,
        };
        Ok(())
    }
}
