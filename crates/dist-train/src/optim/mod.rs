//! Optimizers that update in place and can be stopped and resumed, and the clipping of gradients.

pub(crate) mod adamw;
pub(crate) mod clip;
pub(crate) mod sgd;
mod update;

use candle_core::{DType, Result, Tensor, Var, bail};
use candle_nn::{Optimizer, SGD};

use crate::moving::moved;

/// An optimizer whose state can be written to a checkpoint and read back; what `state_dict` and
/// `load_state_dict` are to PyTorch's optimizers.
///
/// A variable is meant by its position among those that the optimizer was made with.
pub trait StatefulOptimizer: Optimizer {
    /// Returns what it keeps for a variable: tensors of the variable's shape, or scalars, each with
    /// a name of its own that has no `/` and is not `model`.
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

/// candle's has no momentum, so it keeps nothing.
impl StatefulOptimizer for SGD {
    fn state(&self, _: usize) -> Result<Vec<(&'static str, Tensor)>> {
        Ok(Vec::new())
    }

    fn load_state(&mut self, _: usize, name: &str, _: &Tensor) -> Result<()> {
        bail!("SGD has no state {name}")
    }
}

/// Replaces a tensor of a state by one of any floating-point type, on any device.
fn assign(state: &Var, value: &Tensor) -> Result<()> {
    state.set(&moved(value, state.device())?.to_dtype(state.dtype())?)
}

/// A number of steps that can have been taken.
fn step_count(value: &Tensor) -> Result<i32> {
    let steps: i64 = value.to_dtype(DType::I64)?.to_scalar()?;
    match i32::try_from(steps) {
        Ok(count @ 0..) => Ok(count),
        _ => bail!("{steps} steps cannot have been taken, 0 to {} can", i32::MAX),
    }
}
