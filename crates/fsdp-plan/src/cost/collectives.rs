//! What one training step sends, by kind of collective.

use serde::Serialize;

use super::{fit, transfer::Transfer};
use crate::error::Result;

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
