//! A batch with a known loss and without gradients, and the totals of accumulated batches.

use candle_core::{Result, Tensor};
use pmap_mesh::Replica;

use crate::{
    loss::{Attached, BatchLoss, Loss, ShardLoss},
    step::rules::{Goal, Report, Rules},
};

/// A batch with a loss that all replicas know, before a replica differentiates its shard.
pub(crate) struct Batch {
    /// The divisor of the shard's gradients.
    pub(crate) scale: f64,
    /// Totals of this batch and the accumulated batches before it.
    totals: Totals,
    /// The loss of this batch alone.
    loss: BatchLoss,
    /// Tensors attached to the loss of this batch, of all slots.
    aux: Vec<Tensor>,
}

/// Totals of accumulated batches, except for their gradients.
#[derive(Debug)]
pub(crate) struct Totals {
    /// The divisor of the accumulated gradients: the weight of the first batch with nonzero weight.
    /// Gradients divided by it are about as large as the gradients of a mean, so that sums over
    /// many tokens stay within the range of half precision.
    scale: f64,
    loss: BatchLoss,
    /// Tensors attached to the losses, of all slots and batches.
    attached: Attached<Vec<Tensor>>,
}

impl Batch {
    /// Agrees with all replicas on the loss of a batch and on its attached tensors.
    /// `before` are the totals of the accumulated batches.
    ///
    /// The loss of this slot's shard is returned separately, so that its graph can be freed before
    /// the gradients are reduced.
    pub(crate) fn agree(
        ctx: &Replica,
        rules: &Rules,
        loss: Loss<Vec<Tensor>>,
        before: Option<Totals>,
    ) -> Result<(ShardLoss, Self)> {
        let (mut shard, attached) = loss.into_shard(ctx)?;
        let loss = shard.agree(ctx, rules.allow_non_finite, &rules.errors)?;
        if rules.goal == Goal::Update {
            let total_loss = before.as_ref().map_or(loss, |before| before.loss.plus(loss));
            total_loss.require_weight(&rules.errors)?;
        }
        // The scale is 0 while all batches had no weight.
        let scale = match &before {
            Some(before) if before.scale > 0.0 => before.scale,
            _ => loss.weight(),
        };
        let attached = attached.over_replicas(ctx, &rules.errors)?;
        let aux = attached.aux.clone();
        let batch_totals = Totals { scale, loss, attached };
        let totals = match before {
            Some(before) => before.plus(&batch_totals)?,
            None => batch_totals,
        };
        Ok((shard, Self { scale, totals, loss, aux }))
    }

    /// Returns the factor that turns accumulated gradients into the gradients of the mean loss. The
    /// total weight is positive, because an update without weight is rejected.
    pub(crate) fn factor(&self) -> f64 {
        self.scale / self.totals.loss.weight()
    }

    /// Returns the totals to store for the next update, and the report and attached tensors of this
    /// batch.
    pub(crate) fn into_accumulated(self) -> (Totals, Report, Vec<Tensor>) {
        (self.totals, Report { loss: self.loss, grad_norm: 0.0 }, self.aux)
    }

    /// Returns the report of an update with this gradient norm, and the attached tensors; both cover
    /// all batches of the update.
    pub(crate) fn into_update(self, grad_norm: f64) -> (Report, Vec<Tensor>) {
        let Totals { loss, attached, .. } = self.totals;
        (Report { loss, grad_norm }, attached.aux)
    }
}

/// Agrees with all replicas on the loss of a batch that is neither accumulated nor part of an
/// update. Returns the loss of this slot's shard, the loss of the batch, and the attached tensors
/// of this slot.
pub(crate) fn agree_without_totals(
    ctx: &Replica,
    rules: &Rules,
    loss: Loss<Vec<Tensor>>,
) -> Result<(ShardLoss, BatchLoss, Vec<Tensor>)> {
    let (mut shard, attached) = loss.into_shard(ctx)?;
    let loss = shard.agree(ctx, rules.allow_non_finite, &rules.errors)?;
    Ok((shard, loss.require_weight(&rules.errors)?, attached.aux))
}

impl Totals {
    fn plus(self, other: &Self) -> Result<Self> {
        Ok(Self {
            // Batches without weight have zero gradients, so their scale does not matter. All
            // batches with weight have the scale of the first of them, see `Batch::agree`.
            scale: other.scale,
            loss: self.loss.plus(other.loss),
            attached: self.attached.plus(&other.attached)?,
        })
    }
}

/// Adds gradients to the accumulated gradients `before`, which are empty if no batch was
/// accumulated.
pub(crate) fn add_grads(
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
