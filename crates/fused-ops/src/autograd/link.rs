//! Links from an output back to the operation of this crate that made it.
//!
//! candle adds the first gradient of every tensor to zeros: it clears memory, reads both, and writes the
//! sum, and three tensors of one size exist for a moment. So the first operation of this crate that uses
//! an output of this crate takes the output's [token](super::multi) as its input in candle's graph. In the
//! backward pass the user puts the output's gradient into the maker's mailbox and gives candle only a small
//! ticket for it ([`Mailbox`]), so candle adds tickets instead of gradients.
//!
//! candle does not show the operation that made a tensor, so a table has the links by the output's id.
//! Outputs on GPUs have no links.

#![expect(
    clippy::disallowed_types,
    reason = "ids have no order, and nothing iterates over the table"
)]

use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use candle_core::{Tensor, TensorId};

use super::mailbox::Mailbox;
use crate::error::Result;

type LinkTable = HashMap<TensorId, Weak<OutputLink>>;

/// The links of all outputs in memory.
static LINKS: LazyLock<Mutex<LinkTable>> = LazyLock::new(Mutex::default);

/// The way of a gradient to the operation that made an output.
#[derive(Debug)]
pub(super) struct OutputLink {
    token: Tensor,
    grads: Arc<Mailbox<Tensor>>,
    /// The index of the output.
    index: usize,
    is_taken: AtomicBool,
    /// The output, once it exists.
    output: OnceLock<TensorId>,
}

impl OutputLink {
    pub(super) fn new(token: &Tensor, grads: &Arc<Mailbox<Tensor>>, index: usize) -> Arc<Self> {
        let (token, grads) = (token.clone(), Arc::clone(grads));
        let (is_taken, output) = (AtomicBool::new(false), OnceLock::new());
        Arc::new(Self { token, grads, index, is_taken, output })
    }

    /// Lets the next operation take the link of `output`.
    pub(super) fn offer(self: &Arc<Self>, output: &Tensor) {
        if output.device().is_cpu() && self.output.set(output.id()).is_ok() {
            links().insert(output.id(), Arc::downgrade(self));
        }
    }

    /// Takes the link of `output`. Only the first operation that asks gets it: the others pass their
    /// gradients through candle.
    pub(super) fn take(output: &Tensor) -> Option<Arc<Self>> {
        let link = links().get(&output.id()).and_then(Weak::upgrade)?;
        (!link.is_taken.swap(true, Ordering::Relaxed)).then_some(link)
    }

    /// Returns the token, which the user has as input in candle's graph instead of the output.
    pub(super) fn token(&self) -> &Tensor {
        &self.token
    }

    /// Leaves the user's gradient of the output in the maker's mailbox, and returns the token's
    /// gradient, which is the ticket.
    pub(super) fn leave_from_user(&self, grad: &Tensor) -> Result<Tensor> {
        // The token has two tickets per output: first those of the outputs, then those of the links.
        let n_outputs = self.token.elem_count() / 2;
        self.grads.leave(n_outputs + self.index, grad.contiguous()?.detach(), &self.token)
    }

    /// Does the same for the gradient that candle has summed for the output's other users.
    pub(super) fn leave_from_candle(&self, grad: &Tensor) -> Result<Tensor> {
        self.grads.leave(self.index, grad.clone(), &self.token)
    }
}

impl Drop for OutputLink {
    fn drop(&mut self) {
        if let Some(output) = self.output.get() {
            links().remove(output);
        }
    }
}

fn links() -> MutexGuard<'static, LinkTable> {
    LINKS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::ops::linear::linear;

    #[test]
    fn a_link_has_one_user_and_ends_with_its_output() {
        let x = Var::new(&[[1.0_f32, 2.0]], &Device::Cpu).unwrap();
        let y = linear(&x, &x, None, None).unwrap();
        assert!(OutputLink::take(&x).is_none() && OutputLink::take(&y.detach()).is_none());
        let link = OutputLink::take(&y.clone()).unwrap();
        assert!(OutputLink::take(&y).is_none());
        let output = y.id();
        drop(y);
        assert!(links().contains_key(&output));
        drop(link);
        assert!(!links().contains_key(&output));
    }

    /// Kernels read a gradient as adjacent elements.
    #[test]
    fn left_gradients_are_contiguous_and_have_no_history() {
        let x = Var::new(&[[1.0_f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        let y = linear(&x, &x, None, None).unwrap();
        let link = OutputLink::take(&y).unwrap();
        let ticket = link.leave_from_user(&x.t().unwrap()).unwrap();
        let (_, grad) = link.grads.take(&ticket).unwrap().remove(0);
        assert!(grad.is_contiguous() && !grad.track_op());
        assert_eq!(grad.to_vec2::<f32>().unwrap(), [[1.0, 3.0], [2.0, 4.0]]);
    }
}
