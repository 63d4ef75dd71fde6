//! A batch on its way from its loss to gradients, with those of the batches before it.

use candle_core::{Result, Tensor};
use pmap_mesh::Replica;

use crate::{
    loss::{self, BatchLoss, Loss, ShardLoss},
    step::rules::{Goal, Report, Rules},
};

/// One replica's part of a batch, whose loss is known and not yet differentiated.
pub(crate) struct Batch {
    /// What the gradients of the shard's sum are to be divided by.
    pub(crate) scale: f64,
    /// What is known of it and of those before it.
    all: Totals,
    loss: BatchLoss,
    /// What came with its loss, summed over the slots.
    aux: Vec<Tensor>,
}

/// What is known, beside their gradients, of batches that are not yet trained on.
#[derive(Debug)]
pub(crate) struct Totals {
    /// What the gradients of their sums were divided by: the weight of the first batch that has
    /// any. So they are about as large as those of a mean, and sums of many tokens stay within the
    /// range of half precision.
    scale: f64,
    loss: BatchLoss,
    /// The sums of what came with the losses.
    aux: Vec<Tensor>,
}

impl Batch {
    /// Agrees with all replicas on the loss of a batch that follows on `before`, and on what comes
    /// with it.
    ///
    /// The loss of this slot's part comes beside the batch, so that its graph can end before the
    /// gradients are summed.
    pub(crate) fn agree(
        ctx: &Replica,
        rules: &Rules,
        loss: Loss<Vec<Tensor>>,
        before: Option<Totals>,
    ) -> Result<(ShardLoss, Self)> {
        let (mut shard, aux) = loss.of_shard(ctx)?;
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

    /// What gradients are multiplied by, so that they are those of the mean.
    pub(crate) fn factor(&self) -> f64 {
        self.scale / self.all.loss.weight()
    }

    /// What is kept for the next update, and what all replicas know of this batch.
    pub(crate) fn kept(self) -> (Totals, Report, Vec<Tensor>) {
        (self.all, Report { loss: self.loss, grad_norm: 0.0 }, self.aux)
    }

    /// What all replicas know of an update of this norm.
    pub(crate) fn updated(self, grad_norm: f64) -> (Report, Vec<Tensor>) {
        let Totals { loss, aux, .. } = self.all;
        (Report { loss, grad_norm }, aux)
    }
}

/// Agrees with all replicas on the loss of a batch that updates nothing. Returns it beside this
/// slot's part, with what came with the latter.
pub(crate) fn agree_alone(
    ctx: &Replica,
    rules: &Rules,
    loss: Loss<Vec<Tensor>>,
) -> Result<(ShardLoss, BatchLoss, Vec<Tensor>)> {
    let (mut shard, aux) = loss.of_shard(ctx)?;
    let loss = shard.agree(ctx, rules.allow_non_finite, &rules.refusal)?;
    Ok((shard, loss.with_weight(&rules.refusal)?, aux))
}

impl Totals {
    fn plus(self, other: &Self) -> Result<Self> {
        if self.aux.len() != other.aux.len() {
            candle_core::bail!(
                "{} tensors come with the loss, {} came with that of the batch before",
                other.aux.len(),
                self.aux.len()
            )
        }
        let aux = self.aux.iter().zip(&other.aux).map(|(left, right)| left + right);
        Ok(Self {
            // Of batches without weight there are zeros, whatever they are divided by.
            scale: other.scale,
            loss: self.loss.plus(other.loss),
            aux: aux.collect::<Result<_>>()?,
        })
    }
}

/// The sums of gradients and of those of the batches before, of which there may be none.
pub(crate) fn added(
    before: Vec<Option<Tensor>>,
    grads: Vec<Option<Tensor>>,
) -> Result<Vec<Option<Tensor>>> {
    if before.is_empty() {
        return Ok(grads);
    }
    let sum = |pair: (Option<Tensor>, Option<Tensor>)| match pair {
        (Some(left), Some(right)) => (left + right).map(Some),
        (left, right) => Ok(left.or(right)),
    };
    before.into_iter().zip(grads).map(sum).collect()
}
