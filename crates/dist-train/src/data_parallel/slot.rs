//! What one worker keeps between steps, and how it updates its variables.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{Result, Tensor, Var, backprop::GradStore};
use candle_nn::Optimizer;
use pmap_mesh::{ALL, Replica};

use crate::optim::clip;

/// What one worker keeps between steps.
#[derive(Debug)]
pub(super) struct Slot<M, O> {
    pub(super) model: M,
    /// All variables of its device, by name.
    pub(super) vars: Vec<Var>,
    /// The positions in `vars` of those that it updates.
    pub(super) owned: Vec<usize>,
    /// The positions in `owned` of those that it writes to checkpoints: of each variable, one slot
    /// of the whole mesh does.
    pub(super) saved: Vec<usize>,
    /// Made with the variables of `owned`, in their order.
    pub(super) optimizer: O,
    /// The gradients since the last update.
    pub(super) accumulated: Option<Gradients>,
}

/// The gradients of some batches, of this slot's share in them.
#[derive(Debug)]
pub(super) struct Gradients {
    /// The sums over the batches, one for each variable.
    sums: Vec<Tensor>,
    n_batches: usize,
}

/// How gradients are clipped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clip {
    /// The largest norm of all gradients taken together.
    pub(super) max_norm: f64,
    /// How many sets of variables there are on the mesh: as many times the sum over all slots
    /// counts every gradient.
    pub(super) n_sets: usize,
}

/// Locks what a worker keeps. A step locks a slot in the slot's own worker alone, and everything
/// else between steps, so that nobody waits.
///
/// A loss or an optimizer may panic while it holds the lock. That fails the step like an error, and
/// a failed step leaves a slot that can be used: gradients are taken out before they change, and
/// variables may be changed in part by an optimizer's error as well. So a poisoned lock says nothing
/// that the caller was not told, and refusing it would end training where an error does not.
pub(super) fn lock<M, O>(slot: &Mutex<Slot<M, O>>) -> MutexGuard<'_, Slot<M, O>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<M, O: Optimizer> Slot<M, O> {
    /// These gradients and those that were accumulated before, which are taken out.
    pub(super) fn accumulated_with(&mut self, grads: Vec<Tensor>) -> Result<Gradients> {
        match self.accumulated.take() {
            None => Ok(Gradients { sums: grads, n_batches: 1 }),
            Some(before) => before.plus(&grads),
        }
    }

    /// Sums the gradients of its own variables over all slots, and updates these variables by the
    /// mean over the batches.
    pub(super) fn update(
        &mut self,
        ctx: &Replica,
        gradients: Gradients,
        clip: Option<Clip>,
    ) -> Result<()> {
        let mut sums = ctx.psum_list(gradients.sums, &self.owned)?;
        let mut factor = 1.0 / gradients.n_batches as f64;
        if let Some(clip) = clip {
            factor *= clip.factor(ctx, &sums, factor)?;
        }
        if factor < 1.0 {
            sums = sums.iter().map(|sum| sum * factor).collect::<Result<_>>()?;
        }
        let mut store = GradStore::default();
        for (&var, sum) in self.owned.iter().zip(sums) {
            store.insert(&self.vars[var], sum);
        }
        self.optimizer.step(&store)
    }
}

impl Gradients {
    fn plus(self, grads: &[Tensor]) -> Result<Self> {
        let sums = self.sums.iter().zip(grads).map(|(sum, grad)| sum + grad);
        Ok(Self { sums: sums.collect::<Result<_>>()?, n_batches: self.n_batches + 1 })
    }
}

impl Clip {
    /// The factor for gradients that are the mesh's sums times `scale`, of which this slot has
    /// `sums`.
    fn factor(self, ctx: &Replica, sums: &[Tensor], scale: f64) -> Result<f64> {
        let squares = sums.iter().map(clip::squares).sum::<Result<f64>>()?;
        let of_all_sets =
            ctx.psum(&Tensor::new(squares, ctx.device())?, ALL)?.to_scalar::<f64>()?;
        let norm = scale * (of_all_sets / self.n_sets as f64).sqrt();
        Ok(clip::factor(norm, self.max_norm))
    }
}
