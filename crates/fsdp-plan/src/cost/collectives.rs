//! What one training step sends, by kind of collective.

use serde::Serialize;

use super::schedule::{Calls, Operation};
use crate::error::{Error, Result};

/// How often one kind of collective runs in a step, and how much it moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Traffic {
    /// The number of calls.
    pub count: u64,
    /// The bytes of the whole buffer, padding included, over all calls: what `all_gather` puts out,
    /// and what `reduce_scatter` takes in.
    pub bytes: u64,
}

/// The collectives of one step, one forward and one backward pass, as one rank takes part in them.
///
/// Units are gathered before the forward pass, and again before the backward pass because they are
/// freed in between; only the root unit and [kept units](ShardingPlan::with_kept_units) stay, as in
/// PyTorch's `fully_shard`. Gradients are reduced once per unit. Layers that are not cut are
/// broadcast by their owner and reduced to it in the same rhythm, and so are the parts of wrapped
/// tensors. Gradients of replicated parameters are averaged by one `all_reduce` per unit; with
/// several replicas, so is each rank's part of the reduced gradients, over the ranks that hold the
/// same part. A world of one rank sends nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Collectives {
    /// Parameters that are cut, to every rank of the shard group.
    pub all_gather: Traffic,
    /// Gradients of parameters that are cut, to their owners.
    pub reduce_scatter: Traffic,
    /// Gradients of replicated parameters, and of all others over the replicas.
    pub all_reduce: Traffic,
    /// Parameters of whole layers, to every rank of the shard group.
    pub broadcast: Traffic,
    /// Gradients of whole layers, to their owner.
    pub reduce: Traffic,
}

impl Collectives {
    pub(super) fn add(&mut self, calls: Calls) -> Result<()> {
        let traffic = match calls.operation {
            Operation::AllGather => &mut self.all_gather,
            Operation::ReduceScatter => &mut self.reduce_scatter,
            Operation::AllReduce => &mut self.all_reduce,
            Operation::Broadcast => &mut self.broadcast,
            Operation::Reduce => &mut self.reduce,
        };
        let bytes = u64::try_from(u128::from(traffic.bytes) + calls.bytes);
        traffic.bytes =
            bytes.map_err(|_| Error::TotalTooLarge { what: "the bytes sent in a step" })?;
        traffic.count += calls.count;
        Ok(())
    }
}
