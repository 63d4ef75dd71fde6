//! Input and output of a batch's pass through the slots, for both layouts.

use candle_core::{Result as CandleResult, Tensor};

use crate::{loss::Loss, step::rules::Report};

/// Evaluates the caller's loss on a replica's shard of the batch, given the model. It erases the
/// caller's types, so that a pass is compiled once per model and not for each batch and loss type.
pub(crate) type ShardLossFn<'a, M> =
    dyn FnMut(&M, ShardUse) -> CandleResult<Loss<Vec<Tensor>>> + 'a;

/// Whether a shard may be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShardUse {
    /// The loss may be evaluated again.
    Repeated,
    /// The loss may consume its shard.
    Last,
}

/// The report of a batch, and the tensors attached to its loss, of all slots.
pub(crate) type BatchOutcome = (Report, Vec<Tensor>);
