//! Activation checkpointing: the backward pass recomputes intermediate results.
//!
//! Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174;
//! `torch.utils.checkpoint` and `jax.checkpoint` do the same.

use candle_core::{Tensor, Var};

use crate::{
    autograd::{MultiBackward, record_copy, scalar_with_grad},
    error::{Error, Result},
};

const OP: &str = "checkpoint";

/// Returns `f(x)` without keeping its intermediate results, which the backward pass recomputes:
/// PyTorch's `torch.utils.checkpoint` and JAX's `jax.checkpoint`.
///
/// Between the passes, only `x` and the result are stored. `f` must return the same result both
/// times, so it must derive its random numbers from a key, as in [`dropout`](crate::dropout()). A
/// checkpointed block computes its forward pass twice, and takes about a third more time in all.
///
/// `vars` are the variables that `f` reads.
///
/// # Shapes
///
/// Any shapes that `f` takes and returns, on any device.
///
/// # Determinism
///
/// Values and gradients have the same bits as without a checkpoint.
///
/// # Errors
///
/// [`Gradient`](Error::Gradient) if `f` depends on a variable that is not among `vars`, since this
/// variable would silently get no gradient; [`Candle`](Error::Candle) with the error of `f`.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Var};
///
/// let weight = Var::new(3.0_f64, &Device::Cpu)?;
/// let x = Var::new(&[1.0_f64, 2.0], &Device::Cpu)?;
/// let inside = weight.clone();
/// let y = fused_ops::checkpoint(&[weight.clone()], &x, move |x| x.sqr()?.broadcast_mul(&inside))?;
/// assert_eq!(y.to_vec1::<f64>()?, [3.0, 12.0]);
///
/// let grads = y.sum_all()?.backward()?;
/// assert_eq!(grads.get(&weight).unwrap().to_scalar::<f64>()?, 5.0);
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f64>()?, [6.0, 12.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn checkpoint<F>(vars: &[Var], x: &Tensor, f: F) -> Result<Tensor>
where
    F: Fn(&Tensor) -> candle_core::Result<Tensor> + Send + Sync + 'static,
{
    let y = f(&x.detach())?;
    check_variables(vars, &y)?;
    let vars = remove_duplicates(vars);
    let inputs: Vec<_> = [x].into_iter().chain(vars.iter().map(Var::as_tensor)).collect();
    if !inputs.iter().any(|input| input.track_op()) {
        return Ok(y);
    }
    let recompute = Recompute { f, x: x.detach(), is_x_tracked: x.track_op(), vars: vars.clone() };
    record_copy(&inputs, &y, recompute)
}

/// Rejects a result that depends on a variable outside of `vars`.
fn check_variables(vars: &[Var], y: &Tensor) -> Result<()> {
    for node in y.sorted_nodes() {
        if node.is_variable() && vars.iter().all(|var| var.id() != node.id()) {
            let shape = node.dims();
            let cure = format!("list the variable of shape {shape:?} in `vars`, or detach it");
            return Err(Error::Gradient { op: OP, input: "the function", cure });
        }
    }
    Ok(())
}

/// Returns the variables without duplicates, which would add the gradient twice.
fn remove_duplicates(vars: &[Var]) -> Vec<Var> {
    let mut distinct: Vec<Var> = Vec::with_capacity(vars.len());
    for var in vars {
        if distinct.iter().all(|other| other.id() != var.id()) {
            distinct.push(var.clone());
        }
    }
    distinct
}

/// The inputs of the second forward pass.
struct Recompute<F> {
    f: F,
    x: Tensor,
    is_x_tracked: bool,
    vars: Vec<Var>,
}

impl<F> MultiBackward<1> for Recompute<F>
where
    F: Fn(&Tensor) -> candle_core::Result<Tensor> + Send + Sync + 'static,
{
    const NAME: &'static str = "checkpoint";
    const GRADS_MAY_ALIAS: bool = true;

    fn backward(
        &self,
        _: &[Tensor; 1],
        [grad]: [Option<Tensor>; 1],
    ) -> Result<Vec<Option<Tensor>>> {
        let x = Var::from_tensor(&self.x)?;
        let y = (self.f)(&x)?;
        let grads = match grad {
            Some(grad) => scalar_with_grad(&y, grad)?.backward()?,
            None => y.zeros_like()?.backward()?,
        };
        let gradient = |var: &Var| match grads.get(var) {
            Some(grad) => Ok(Some(grad.clone())),
            None => Ok(Some(var.zeros_like()?)),
        };
        let grad_x = if self.is_x_tracked { gradient(&x)? } else { None };
        [Ok(grad_x)].into_iter().chain(self.vars.iter().map(gradient)).collect()
    }
}
