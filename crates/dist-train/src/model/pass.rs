//! What a pass of a batch through the slots is given and returns, however the model is laid out.

use candle_core::{Result as CandleResult, Tensor};

use crate::{loss::Loss, step::rules::Report};

/// Evaluates the caller's loss on a replica's shard of the batch, given the model. No type of the
/// caller is left, so that a pass is compiled once for a model and not for each batch and loss.
pub(crate) type ShardLossFn<'a, M> =
    dyn FnMut(&M, ShardUse) -> CandleResult<Loss<Vec<Tensor>>> + 'a;

/// Whether a shard is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShardUse {
    /// The loss may be evaluated again.
    Repeated,
    /// It is not, and may consume its shard.
    Last,
}

/// What all replicas know of a batch, and the sums of what came with its loss.
pub(crate) type BatchOutcome = (Report, Vec<Tensor>);
