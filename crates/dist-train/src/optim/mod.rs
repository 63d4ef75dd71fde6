//! Optimizers that update in place and can be stopped and resumed, and the clipping of gradients.

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

/// An optimizer whose state can be written to a checkpoint and read back; what `state_dict` and
/// `load_state_dict` are to PyTorch's optimizers.
///
/// A variable is meant by its position among those that the optimizer was made with.
pub trait StatefulOptimizer: Optimizer {
    /// Returns what it keeps for a variable: tensors of the variable's shape, or scalars, each with
    /// a name of its own that has no `/` and is not `model`. `master` is the value of a half in
    /// single precision: a checkpoint has it in place of the half.
    ///
    /// # Errors
    ///
    /// If there is no such variable, or candle fails.
    fn state(&self, var: usize) -> Result<Vec<(&'static str, Tensor)>>;

    /// Replaces one of those tensors, whose shape does not change.
    ///
    /// # Errors
    ///
    /// If there is no such variable or tensor, its value cannot be right, or candle fails.
    fn load_state(&mut self, var: usize, name: &str, value: &Tensor) -> Result<()>;
}

/// Adds the state of an optimizer's variable number `var`, which is the range `model` of a parameter,
/// to the tensors of a slot of this process, and returns its master if there is one.
///
/// # Errors
///
/// [`Error::Optimizer`] if it cannot return its state, and those of [`StateDict::add`].
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

/// Loads the state of an optimizer's variable number `var`, which is the range `model` of a parameter.
///
/// # Errors
///
/// [`Error::Optimizer`] if it rejects its state, and those of [`Checkpoint::like`].
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

/// Returns the error of an optimizer, about its variable `model`.
fn failed(model: TensorKey<'_>, cause: candle_core::Error) -> Error {
    Error::Optimizer { parameter: model.parameter.to_owned(), cause }
}

/// candle's has no momentum, so it keeps nothing.
impl StatefulOptimizer for SGD {
    fn state(&self, _: usize) -> Result<Vec<(&'static str, Tensor)>> {
        Ok(Vec::new())
    }

    fn load_state(&mut self, _: usize, name: &str, _: &Tensor) -> Result<()> {
        bail!("SGD has no state {name}")
    }
}
