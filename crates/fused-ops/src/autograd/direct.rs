//! Gradients of variables that bypass candle's sums.
//!
//! candle adds the first gradient of a tensor to zeros, so this gradient exists three times for a
//! moment. candle needs no gradient of a variable, so the operations of this crate can keep it, and
//! return `None`.

use std::cell::RefCell;

use candle_core::{Result, Tensor, TensorId, backprop::GradStore};

use crate::error;

thread_local! {
    /// The variables of the innermost pass of this thread, if it was started by
    /// [`with_direct_grads`].
    static INNERMOST: RefCell<Option<DirectGrads>> = const { RefCell::new(None) };
}

/// The gradients of some variables from operations of this crate.
struct DirectGrads {
    /// Other passes may run on this thread while a kernel of candle waits, so gradients of other
    /// variables are left to candle.
    variables: Vec<TensorId>,
    grads: GradStore,
}

/// Runs a backward pass of candle that takes less time and memory: the operations of this crate do
/// not add the first gradient of one of the `variables` to zeros. `pass` returns the result of
/// [`Tensor::backward`] or [`backward_from_many`](crate::backward_from_many()).
///
/// Only this pass may differentiate the variables on this thread. Other threads may differentiate
/// them at the same time.
///
/// # Determinism
///
/// The gradients are equal to candle's. Only if operations of this crate and of candle give a
/// variable three or more gradients, the sum may round differently.
///
/// # Errors
///
/// Returns the errors of `pass`.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Var};
/// use fused_ops::with_direct_grads;
///
/// let w = Var::new(&[[2.0_f32, 1.0]], &Device::Cpu)?;
/// let x = Var::new(&[[3.0_f32, 5.0]], &Device::Cpu)?;
/// let y = fused_ops::linear(&x, &w, None, None)?;
/// let grads = with_direct_grads([w.as_tensor()], || y.backward())?;
/// assert_eq!(grads.get(&w).unwrap().to_vec2::<f32>()?, [[3.0, 5.0]]);
/// assert_eq!(grads.get(&x).unwrap().to_vec2::<f32>()?, [[2.0, 1.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn with_direct_grads<'a>(
    variables: impl IntoIterator<Item = &'a Tensor>,
    pass: impl FnOnce() -> Result<GradStore>,
) -> Result<GradStore> {
    let variables = variables.into_iter().map(Tensor::id).collect();
    let own = DirectGrads { variables, grads: GradStore::default() };
    let _outer = OuterPass(INNERMOST.replace(Some(own)));
    let mut grads = pass()?;
    if let Some(own) = INNERMOST.take() {
        grads.extend(own.grads)?;
    }
    Ok(grads)
}

/// Restores the outer pass, also after a panic.
struct OuterPass(Option<DirectGrads>);

impl Drop for OuterPass {
    fn drop(&mut self) {
        INNERMOST.set(self.0.take());
    }
}

/// Returns the gradients of `inputs` that `backward` computes, without those of the innermost pass's
/// variables, which are kept for the end of the pass if they `are_own`. A pass within `backward`
/// is separate.
pub(super) fn keep_direct(
    inputs: &[&Tensor],
    are_own: bool,
    backward: impl FnOnce() -> error::Result<Vec<Option<Tensor>>>,
) -> Result<Vec<Option<Tensor>>> {
    let outer = OuterPass(INNERMOST.take());
    let mut grads = backward()?;
    drop(outer);
    for (input, grad) in inputs.iter().zip(&mut grads) {
        if are_own
            && is_direct(input)
            && let Some(grad) = grad.take()
        {
            // The sum is computed without a borrow, since its kernel may run another pass.
            let before = with_innermost(|pass| pass.grads.remove(input));
            let sum = before.map_or_else(|| Ok(grad.detach()), |before| before.add(&grad))?;
            with_innermost(|pass| pass.grads.insert(input, sum));
        }
    }
    Ok(grads)
}

fn is_direct(input: &Tensor) -> bool {
    let is_direct = with_innermost(|pass| pass.variables.contains(&input.id()).then_some(()));
    input.is_variable() && is_direct.is_some()
}

fn with_innermost<T>(f: impl FnOnce(&mut DirectGrads) -> Option<T>) -> Option<T> {
    INNERMOST.with_borrow_mut(|pass| pass.as_mut().and_then(f))
}
