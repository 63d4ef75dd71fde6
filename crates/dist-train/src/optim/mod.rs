//! Optimizers with in-place updates and resumable state, and gradient clipping.

pub(crate) mod adamw;
pub(crate) mod clip;
pub(crate) mod sgd;
mod state;
mod update;

use candle_core::{Result, Tensor, bail};
use candle_nn::{Optimizer, SGD};
use dist_checkpoint::{Checkpoint, StateDict, TensorKey};

use crate::{
    error::{self, Error},
    optim::update::MASTER,
};

/// An optimizer with a state that can be saved and loaded, like `state_dict` and `load_state_dict`
/// of PyTorch's optimizers.
///
/// The index `var` refers to the order of the variables the optimizer was created with.
pub trait StatefulOptimizer: Optimizer {
    /// Returns the state of a variable: tensors of the variable's shape, or scalars. Each tensor
    /// has a unique name, which must not contain `/` and must not be `model`. A checkpoint stores
    /// the tensor `master`, the single-precision value of a half-precision variable, in place of
    /// the variable.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no such variable, and errors of candle.
    fn state(&self, var: usize) -> Result<Vec<(&'static str, Tensor)>>;

    /// Replaces one tensor of the state; its shape must not change.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no such variable or tensor or the value is invalid, and errors
    /// of candle.
    fn load_state(&mut self, var: usize, name: &str, value: &Tensor) -> Result<()>;
}

/// Adds the state of an optimizer's variable `var` to the tensors of a slot of this process.
/// `model` is the key of the variable itself. Returns the master weights of the variable, if there
/// are any.
///
/// # Errors
///
/// Returns [`Error::Optimizer`] if the optimizer cannot return its state, and the errors of
/// [`StateDict::add`].
pub(crate) fn add_state(
    state: &mut StateDict,
    local_slot: usize,
    model: TensorKey<'_>,
    optimizer: &impl StatefulOptimizer,
    var: usize,
) -> error::Result<Option<Tensor>> {
    let mut master = None;
    for (kind, items) in optimizer.state(var).map_err(|cause| failed(model, cause))? {
        if kind == MASTER {
            master = Some(items);
        } else {
            state.add(local_slot, TensorKey { kind, ..model }, items)?;
        }
    }
    Ok(master)
}

/// Loads the state of an optimizer's variable `var`; `model` is the key of the variable itself.
///
/// # Errors
///
/// Returns [`Error::Optimizer`] if the optimizer rejects its state, and the errors of
/// [`Checkpoint::like`].
pub(crate) fn load_state(
    checkpoint: &Checkpoint,
    model: TensorKey<'_>,
    optimizer: &mut impl StatefulOptimizer,
    var: usize,
) -> error::Result<()> {
    for (kind, like) in optimizer.state(var).map_err(|cause| failed(model, cause))? {
        let key = if kind == MASTER { model } else { TensorKey { kind, ..model } };
        let value = checkpoint.like(key, &like)?;
        optimizer.load_state(var, kind, &value).map_err(|cause| failed(model, cause))?;
    }
    Ok(())
}

/// Checks that an optimizer uses all state that a checkpoint has for its variable `var`: another
/// optimizer may have written the checkpoint.
///
/// # Errors
///
/// Returns [`Error::Optimizer`] for a state that the optimizer does not have.
pub(crate) fn check_state(
    checkpoint: &Checkpoint,
    model: TensorKey<'_>,
    optimizer: &impl StatefulOptimizer,
    var: usize,
) -> error::Result<()> {
    let own = optimizer.state(var).map_err(|cause| failed(model, cause))?;
    for kind in checkpoint.kinds(model.parameter) {
        if kind != model.kind && own.iter().all(|(name, _)| *name != kind) {
            let message = format!("the checkpoint has its state {kind}, which the optimizer lacks");
            return Err(failed(model, candle_core::Error::Msg(message)));
        }
    }
    Ok(())
}

/// Wraps an error of an optimizer for the variable with the key `model`.
fn failed(model: TensorKey<'_>, cause: candle_core::Error) -> Error {
    Error::Optimizer { parameter: model.parameter.to_owned(), cause }
}

/// candle's SGD has no momentum, so it has no state.
impl StatefulOptimizer for SGD {
    fn state(&self, _: usize) -> Result<Vec<(&'static str, Tensor)>> {
        Ok(Vec::new())
    }

    fn load_state(&mut self, _: usize, name: &str, _: &Tensor) -> Result<()> {
        bail!("SGD has no state {name}")
    }
}
