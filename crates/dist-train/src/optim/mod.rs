//! Optimizers that can be stopped and resumed.

pub(crate) mod adamw;

use candle_core::{Result, Tensor, bail};
use candle_nn::{Optimizer, SGD};

/// An optimizer whose state can be written to a checkpoint and read back; what `state_dict` and
/// `load_state_dict` are to PyTorch's.
pub trait StatefulOptimizer: Optimizer {
    /// What it keeps for the n-th of the variables that it was made with: tensors of the variable's
    /// shape, or scalars, each with a name.
    fn state(&self, var: usize) -> Vec<(&'static str, Tensor)>;

    /// Replaces one of those tensors, whose shape does not change.
    ///
    /// # Errors
    ///
    /// If there is no such tensor, or candle fails.
    fn load_state(&mut self, var: usize, name: &str, value: &Tensor) -> Result<()>;
}

/// candle's has no momentum, so it keeps nothing.
impl StatefulOptimizer for SGD {
    fn state(&self, _: usize) -> Vec<(&'static str, Tensor)> {
        Vec::new()
    }

    fn load_state(&mut self, _: usize, name: &str, _: &Tensor) -> Result<()> {
        bail!("SGD has no state {name}")
    }
}
