//! One call of a step: which parameters travel, to whom, and how many bytes that is.

use serde::Serialize;

use crate::plan::ShardingPlan;

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
