//! How long collectives take, by the alpha–beta model.

use super::transfer::{Collective, Scope, Transfer};
use crate::{
    error::{Error, Result},
    plan::ShardingPlan,
};

/// A link between two ranks: what a message costs whatever its size (alpha), and how much passes
/// per second (1 / beta).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// Nanoseconds for a message of no bytes.
    pub latency_ns: u64,
    /// Bytes per second, in one direction.
    pub bytes_per_s: u64,
}

/// The links of a cluster: nodes of several ranks, ranks of a node next to each other.
///
/// # Examples
///
/// ```
/// use fsdp_plan::cost::{Link, Links};
///
/// // Eight cards on PCIe 4.0 in each node, nodes on 25 Gb/s Ethernet that the cards share.
/// let intra = Link { latency_ns: 10_000, bytes_per_s: 20_000_000_000 };
/// let inter = Link { latency_ns: 50_000, bytes_per_s: 3_125_000_000 / 8 };
/// let links = Links::new(8, intra, inter)?;
/// # let _ = links;
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Links {
    /// Ranks in a node.
    pub ranks_per_node: u64,
    /// The link of a rank to another one of its node.
    pub intra: Link,
    /// The link of a rank to one of another node: its part of the node's network.
    pub inter: Link,
}

impl Links {
    /// Eight H100 in a node: 450 GB/s each way by `NVLink`, 50 GB/s by a 400 Gb/s adapter for each
    /// (NVIDIA's data sheets of H100 SXM and `ConnectX`-7). The latencies, 2 and 5 µs, are of the
    /// usual size and not of a data sheet.
    pub const H100: Self = Self {
        ranks_per_node: 8,
        intra: Link { latency_ns: 2_000, bytes_per_s: 450_000_000_000 },
        inter: Link { latency_ns: 5_000, bytes_per_s: 50_000_000_000 },
    };

    /// Joins the links of a cluster.
    ///
    /// # Errors
    ///
    /// [`Error::Zero`] if a node has no ranks, or a link passes nothing.
    pub fn new(ranks_per_node: u64, intra: Link, inter: Link) -> Result<Self> {
        let what = match (ranks_per_node, intra.bytes_per_s, inter.bytes_per_s) {
            (0, ..) => "the number of ranks in a node",
            (_, 0, _) | (_, _, 0) => "the bytes per second of a link",
            _ => return Ok(Self { ranks_per_node, intra, inter }),
        };
        Err(Error::Zero { what })
    }

    /// The seconds that a step's calls of a transfer take as rings.
    ///
    /// `n` ranks pass chunks on in n − 1 steps, each as slow as the slowest link in it; of a ring
    /// through several nodes as many links lead from node to node as there are nodes. To the rank
    /// that has the smallest part comes all but that: (n − 1) / n of equal parts.
    pub(super) fn seconds(
        &self,
        plan: &ShardingPlan,
        collective: Collective,
        transfer: &Transfer,
    ) -> f64 {
        let n = transfer.ranks;
        let bytes = float(transfer.bytes);
        let (rounds, passed) = match collective {
            Collective::AllGather | Collective::ReduceScatter => {
                (1.0, float(transfer.bytes - transfer.smallest_part_bytes))
            }
            Collective::AllReduce => (2.0, float(n - 1) / float(n) * bytes),
        };
        let n_nodes = self.nodes(plan, transfer);
        let crossings = if n_nodes > 1 { n_nodes.min(n - 1) } else { 0 };
        let steps_ns = float(self.intra.latency_ns) * float(n - 1 - crossings)
            + float(self.inter.latency_ns) * float(crossings);
        let slowest = if n_nodes > 1 {
            self.intra.bytes_per_s.min(self.inter.bytes_per_s)
        } else {
            self.intra.bytes_per_s
        };
        rounds * float(transfer.count) * (steps_ns * 1e-9 + passed / float(slowest))
    }

    /// The nodes that the ranks of a call are in.
    fn nodes(&self, plan: &ShardingPlan, transfer: &Transfer) -> u64 {
        let n = transfer.ranks;
        let group = plan.shard_group().as_u64();
        match transfer.scope {
            Scope::ShardGroup | Scope::World => n.div_ceil(self.ranks_per_node),
            // The same member of each group: a group apart.
            Scope::Replicas if group >= self.ranks_per_node => n,
            Scope::Replicas => (n * group).div_ceil(self.ranks_per_node),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a time for people; 53 bits are enough of it")]
fn float(number: u64) -> f64 {
    number as f64
}
