//! Times of collectives by the alpha–beta model.

use super::transfer::{CollectiveKind, Transfer, TransferScope};
use crate::{
    error::{Error, Result},
    plan::ShardingPlan,
};

/// A link between two ranks: a fixed cost per message (alpha) and a bandwidth (1 / beta).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// Latency of an empty message, in nanoseconds.
    pub latency_ns: u64,
    /// Bandwidth in one direction, in bytes per second.
    pub bytes_per_s: u64,
}

/// The links of a cluster of nodes, where the ranks of a node are neighbors.
///
/// # Examples
///
/// ```
/// use fsdp_plan::cost::{Link, Links};
///
/// // Eight cards on PCIe 4.0 per node; the cards of a node share 25 Gb/s Ethernet.
/// let intra = Link { latency_ns: 10_000, bytes_per_s: 20_000_000_000 };
/// let inter = Link { latency_ns: 50_000, bytes_per_s: 3_125_000_000 / 8 };
/// let links = Links::new(8, intra, inter)?;
/// # let _ = links;
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Links {
    /// Ranks per node.
    pub ranks_per_node: u64,
    /// Link between ranks of a node.
    pub intra: Link,
    /// Link between ranks of different nodes: the share of one rank in the node's network.
    pub inter: Link,
}

impl Links {
    /// Eight H100 per node: 450 GB/s each way by `NVLink`, and a 400 Gb/s adapter (50 GB/s) per
    /// rank, from NVIDIA's data sheets of H100 SXM and `ConnectX`-7. The latencies, 2 and 5 µs, are
    /// typical values, not from a data sheet.
    pub const H100: Self = Self {
        ranks_per_node: 8,
        intra: Link { latency_ns: 2_000, bytes_per_s: 450_000_000_000 },
        inter: Link { latency_ns: 5_000, bytes_per_s: 50_000_000_000 },
    };

    /// Creates the links of a cluster.
    ///
    /// # Errors
    ///
    /// [`Error::Zero`] if a node has no ranks, or a link has no bandwidth.
    pub fn new(ranks_per_node: u64, intra: Link, inter: Link) -> Result<Self> {
        let what = match (ranks_per_node, intra.bytes_per_s, inter.bytes_per_s) {
            (0, ..) => "the number of ranks in a node",
            (_, 0, _) | (_, _, 0) => "the bytes per second of a link",
            _ => return Ok(Self { ranks_per_node, intra, inter }),
        };
        Err(Error::Zero { what })
    }

    /// Returns the seconds per step that a transfer takes as ring collectives.
    ///
    /// `n` ranks pass chunks in n − 1 rounds, each as slow as the slowest link. A ring through
    /// several nodes crosses between nodes as often as there are nodes. The rank with the smallest
    /// part receives the most: everything but that part, (n − 1) / n of equal parts.
    pub(super) fn seconds(
        &self,
        plan: &ShardingPlan,
        collective: CollectiveKind,
        transfer: &Transfer,
    ) -> f64 {
        let n = transfer.ranks;
        let bytes = float(transfer.bytes);
        let (rounds, passed_bytes) = match collective {
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter => {
                (1.0, float(transfer.bytes - transfer.smallest_part_bytes))
            }
            CollectiveKind::AllReduce => (2.0, float(n - 1) / float(n) * bytes),
        };
        let n_nodes = self.n_nodes(plan, transfer);
        let crossings = if n_nodes > 1 { n_nodes.min(n - 1) } else { 0 };
        let steps_ns = float(self.intra.latency_ns) * float(n - 1 - crossings)
            + float(self.inter.latency_ns) * float(crossings);
        let slowest = if n_nodes > 1 {
            self.intra.bytes_per_s.min(self.inter.bytes_per_s)
        } else {
            self.intra.bytes_per_s
        };
        rounds * float(transfer.count) * (steps_ns * 1e-9 + passed_bytes / float(slowest))
    }

    /// Returns the number of nodes of a transfer's ranks.
    fn n_nodes(&self, plan: &ShardingPlan, transfer: &Transfer) -> u64 {
        let n = transfer.ranks;
        let group = plan.shard_group().as_u64();
        match transfer.scope {
            TransferScope::ShardGroup | TransferScope::World => n.div_ceil(self.ranks_per_node),
            // The ranks are the same member of each group, so neighbors are one group apart.
            TransferScope::Replicas if group >= self.ranks_per_node => n,
            TransferScope::Replicas => (n * group).div_ceil(self.ranks_per_node),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "53 bits are enough for an estimate")]
fn float(number: u64) -> f64 {
    number as f64
}
