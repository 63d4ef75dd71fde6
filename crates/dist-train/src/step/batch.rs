//! A batch on its way from its loss to gradients, with those of the batches before it.

use candle_core::{Result, Tensor};
use pmap_mesh::{Replica, TensorTree};

use crate::{
    loss::{self, BatchLoss, Loss, ShardLoss},
    step::rules::{Report, Rules, Then},
};

/// One replica's part of a batch, whose loss is known and not yet differentiated.
pub(crate) struct Batch<A> {
    /// What the gradients of the shard's sum are to be divided by.
    pub(crate) scale: f64,
    loss: BatchLoss,
    before: Option<Accumulated>,
    aux: A,
}

/// Some batches that are not yet trained on.
#[derive(Debug)]
pub(crate) struct Accumulated {
    /// Gradients of the batches' sums over `scale`, of whatever the one who accumulates counts.
    pub(crate) grads: Vec<Option<Tensor>>,
    /// The weight of the first batch that has any: divided by it, gradients are about as large as
    /// those of a mean, so that the sums of many tokens stay within the range of half precision.
    scale: f64,
    pub(crate) loss: BatchLoss,
    /// The sums of what came with the losses.
    aux: Vec<Tensor>,
}

/// A batch whose gradients were added to those before it.
pub(crate) struct Differentiated<A> {
    pub(crate) all: Accumulated,
    loss: BatchLoss,
    /// What came with the loss of this batch, summed over the slots.
    aux: A,
}

impl<A: TensorTree> Batch<A> {
    /// Agrees with all replicas on the loss of a batch that follows on `before`.
    ///
    /// The loss of this slot's part comes beside the batch, so that its graph can end before the
    /// gradients are summed.
    pub(crate) fn agree(
        ctx: &Replica,
        rules: &Rules,
        loss: Loss<A>,
        before: Option<Accumulated>,
    ) -> Result<(ShardLoss, Self)> {
        let (mut shard, aux) = loss.of_shard(ctx)?;
        let loss = shard.agree(ctx, rules.allow_non_finite, &rules.refusal)?;
        if let Then::Update = rules.then {
            let all = before.as_ref().map_or(loss, |before| before.loss.plus(loss));
            all.with_weight(&rules.refusal)?;
        }
        let weighed = before.as_ref().map(|before| before.scale).filter(|&scale| scale > 0.0);
        let scale = weighed.unwrap_or(loss.weight());
        Ok((shard, Self { scale, loss, before, aux }))
    }

    /// Adds the batch's gradients to those before it.
    pub(crate) fn with_gradients(
        self,
        ctx: &Replica,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Differentiated<A>> {
        let Self { scale, loss, before, aux } = self;
        let sums = loss::summed(ctx, &aux)?;
        let aux = loss::with_leaves(&aux, sums.clone());
        let this = Accumulated { grads, scale, loss, aux: sums };
        let all = match before {
            Some(before) => before.plus(this)?,
            None => this,
        };
        Ok(Differentiated { all, loss, aux })
    }
}

impl<A: TensorTree> Differentiated<A> {
    /// What is kept for the next update, and what all replicas know of this batch.
    pub(crate) fn kept(self) -> (Accumulated, Report, A) {
        (self.all, Report { loss: self.loss, grad_norm: 0.0 }, self.aux)
    }

    /// What all replicas know of an update of this norm.
    pub(crate) fn updated(self, grad_norm: f64) -> (Report, A) {
        let Accumulated { loss, aux, .. } = self.all;
        (Report { loss, grad_norm }, loss::with_leaves(&self.aux, aux))
    }
}

impl Accumulated {
    /// What gradients are multiplied by, so that they are those of the mean.
    pub(crate) fn factor(&self) -> f64 {
        self.scale / self.loss.weight()
    }

    fn plus(self, other: Self) -> Result<Self> {
        let grads = self.grads.into_iter().zip(other.grads).map(|pair| match pair {
            (Some(left), Some(right)) => (left + right).map(Some),
            (left, right) => Ok(left.or(right)),
        });
        if self.aux.len() != other.aux.len() {
            candle_core::bail!(
                "{} tensors come with the loss, {} came with that of the batch before",
                other.aux.len(),
                self.aux.len()
            )
        }
        let aux = self.aux.iter().zip(&other.aux).map(|(left, right)| left + right);
        Ok(Self {
            grads: grads.collect::<Result<_>>()?,
            // Of batches without weight there are zeros, whatever they are divided by.
            scale: other.scale,
            loss: self.loss.plus(other.loss),
            aux: aux.collect::<Result<_>>()?,
        })
    }
}
