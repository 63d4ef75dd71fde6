//! A batch between its loss and its gradients, with the totals of accumulated batches.

use candle_core::{Result, Tensor};
use pmap_mesh::Replica;

use crate::{
    loss::{self, BatchLoss, Loss, ShardLoss},
    step::rules::{Goal, Report, Rules},
};

/// One replica's shard of a batch whose loss is known but not yet differentiated.
pub(crate) struct Batch {
    /// The divisor of the shard's gradients.
    pub(crate) scale: f64,
    /// Totals of this batch and the accumulated batches before it.
    all: Totals,
    loss: BatchLoss,
    /// Tensors attached to the loss, summed over the slots.
    aux: Vec<Tensor>,
}

/// Totals of the accumulated batches, except their gradients.
#[derive(Debug)]
pub(crate) struct Totals {
    /// The divisor of the accumulated gradients: the weight of the first batch with nonzero weight.
    /// Dividing keeps the gradients about as large as a mean's, so that sums over many tokens stay
    /// within the range of half precision.
    scale: f64,
    loss: BatchLoss,
    /// Sums of the tensors attached to the losses.
    aux: Vec<Tensor>,
}

impl Batch {
    /// Exchanges the loss of a batch and its attached tensors with all replicas, and adds the
    /// totals `before`.
    ///
    /// This slot's shard of the loss is returned separately, so that its graph can be freed before
    /// the gradients are reduced.
    pub(crate) fn agree(
        ctx: &Replica,
        rules: &Rules,
        loss: Loss<Vec<Tensor>>,
        before: Option<Totals>,
    ) -> Result<(ShardLoss, Self)> {
        let (mut shard, aux) = loss.into_shard(ctx)?;
        let loss = shard.agree(ctx, rules.allow_non_finite, &rules.refusal)?;
        if rules.goal == Goal::Update {
            let all = before.as_ref().map_or(loss, |before| before.loss.plus(loss));
            all.with_weight(&rules.refusal)?;
        }
        let weighed = before.as_ref().map(|before| before.scale).filter(|&scale| scale > 0.0);
        let scale = weighed.unwrap_or(loss.weight());
        let aux = loss::summed(ctx, aux)?;
        let this = Totals { scale, loss, aux: aux.clone() };
        let all = match before {
            Some(before) => before.plus(&this)?,
            None => this,
        };
        Ok((shard, Self { scale, all, loss, aux }))
    }

    /// Returns the factor that turns accumulated gradients into gradients of the mean.
    pub(crate) fn factor(&self) -> f64 {
        self.scale / self.all.loss.weight()
    }

    /// Returns the totals to store for the next update, and the report and attached tensors of this
    /// batch.
    pub(crate) fn kept(self) -> (Totals, Report, Vec<Tensor>) {
        (self.all, Report { loss: self.loss, grad_norm: 0.0 }, self.aux)
    }

    /// Returns the report of an update with this gradient norm, and the attached tensors.
    pub(crate) fn updated(self, grad_norm: f64) -> (Report, Vec<Tensor>) {
        let Totals { loss, aux, .. } = self.all;
        (Report { loss, grad_norm }, aux)
    }
}

/// Agrees with all replicas on the loss of a batch without an update. Returns the local part, the
/// loss of the batch, and the local attached tensors.
pub(crate) fn agree_alone(
    ctx: &Replica,
    rules: &Rules,
    loss: Loss<Vec<Tensor>>,
) -> Result<(ShardLoss, BatchLoss, Vec<Tensor>)> {
    let (mut shard, aux) = loss.into_shard(ctx)?;
    let loss = shard.agree(ctx, rules.allow_non_finite, &rules.refusal)?;
    Ok((shard, loss.with_weight(&rules.refusal)?, aux))
}

impl Totals {
    fn plus(self, other: &Self) -> Result<Self> {
        if self.aux.len() != other.aux.len() {
            candle_core::bail!(
                "{} tensors come with the loss, {} came with the previous batch's loss",
                other.aux.len(),
                self.aux.len()
            )
        }
        let aux = self.aux.iter().zip(&other.aux).map(|(left, right)| left + right);
        Ok(Self {
            // Earlier batches without weight have zero gradients, so their scale does not matter.
            // All others share the scale of the first, see `Batch::agree`.
            scale: other.scale,
            loss: self.loss.plus(other.loss),
            aux: aux.collect::<Result<_>>()?,
        })
    }
}

/// Adds gradients to the accumulated gradients of earlier batches, if there are any.
pub(crate) fn added(
    before: Vec<Option<Tensor>>,
    grads: Vec<Option<Tensor>>,
) -> Result<Vec<Option<Tensor>>> {
    if before.is_empty() {
        return Ok(grads);
    }
    let mut sums = Vec::with_capacity(grads.len());
    for pair in before.into_iter().zip(grads) {
        sums.push(match pair {
            (Some(left), Some(right)) => Some((left + right)?),
            (left, right) => left.or(right),
        });
    }
    Ok(sums)
}
