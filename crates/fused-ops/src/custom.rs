//! Custom backward functions, like `torch.autograd.Function` and `jax.custom_vjp`.

use std::sync::{Arc, OnceLock};

use candle_core::{DType, Tensor, backprop::GradStore};

use crate::{
    autograd::{Mailbox, MultiBackward, record_copy, scalar_with_grad},
    error::{Error, Result},
};

/// Returns a copy of `output` with a backward of your own, which computes the gradients of
/// `inputs`.
///
/// candle's own custom operations have at most three inputs, and compute when they are applied.
/// Here the caller has already computed `output`, from any number of inputs, on any device; the
/// copy does not keep the history of `output`. Each backward pass of candle calls `backward` at
/// most once, without a lock, with the output and its gradient. `backward` returns a gradient for
/// each input in turn, of the input's shape. The gradient of an input that does not
/// [track](Tensor::track_op) operations is dropped, and the gradient of a variable may be `None`.
///
/// Several threads may differentiate the result at once, like any tensor of candle.
///
/// If no input tracks operations, neither does the result.
///
/// # Errors
///
/// Returns [`Candle`](crate::Error::Candle) if candle cannot copy the output.
///
/// The backward pass of candle returns the errors of `backward`. It also fails if the number of
/// gradients differs from the number of inputs, or if a tracked input that is not a variable gets
/// no gradient.
///
/// # Examples
///
/// A product with a doubled gradient:
///
/// ```
/// use candle_core::{Device, Var};
/// use fused_ops::with_backward;
///
/// let x = Var::new(3.0_f64, &Device::Cpu)?;
/// let y = Var::new(5.0_f64, &Device::Cpu)?;
/// let x_here = x.as_detached_tensor();
/// let y_here = y.as_detached_tensor();
/// let product = x_here.mul(&y_here)?;
/// let z = with_backward(&[&x, &y], &product, move |_, grad| {
///     let double = (grad * 2.0)?;
///     Ok(vec![Some(double.mul(&y_here)?), Some(double.mul(&x_here)?)])
/// })?;
/// let grads = z.backward()?;
/// assert_eq!(grads.get(&x).unwrap().to_scalar::<f64>()?, 10.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn with_backward<F>(inputs: &[&Tensor], output: &Tensor, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor, Tensor) -> candle_core::Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
{
    if !inputs.iter().any(|input| input.track_op()) {
        return Ok(output.detach());
    }
    let grad_uses = inputs.iter().map(|input| GradientUse::new(input)).collect();
    record_copy(inputs, output, CustomBackward { backward, grad_uses })
}

/// Returns the gradients of all variables that `outputs` depend on, starting from the gradient of
/// each, like PyTorch's `torch.autograd.backward(outputs, grads)`.
///
/// # Shapes
///
/// A gradient has the shape of its output.
///
/// # Errors
///
/// Returns [`Candle`](crate::Error::Candle) if shapes differ or candle's backward pass fails.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor, Var};
///
/// let x = Var::new(3.0_f64, &Device::Cpu)?;
/// let one = Tensor::new(1.0_f64, &Device::Cpu)?;
/// let grads = fused_ops::backward_from_many([(x.sqr()?, one.clone()), ((&*x * 10.0)?, one)])?;
/// assert_eq!(grads.get(&x).unwrap().to_scalar::<f64>()?, 16.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn backward_from_many(
    outputs: impl IntoIterator<Item = (Tensor, Tensor)>,
) -> Result<GradStore> {
    let mut seeds = outputs.into_iter().map(|(output, grad)| seed(&output, grad));
    let Some(first) = seeds.next() else { return Ok(GradStore::default()) };
    let sum = seeds.try_fold(first?, |sum, seed| Ok::<_, Error>((sum + seed?)?))?;
    Ok(sum.backward()?)
}

/// Returns a scalar. Its backward pass starts at `output` with the gradient `grad`; its value is
/// zero.
fn seed(output: &Tensor, grad: Tensor) -> Result<Tensor> {
    if grad.shape() != output.shape() {
        return Err(candle_core::Error::msg(format!(
            "a gradient of shape {:?} for an output of shape {:?}",
            grad.dims(),
            output.dims()
        ))
        .into());
    }
    scalar_with_grad(output, grad)
}

/// Returns copies of `outputs` with one backward of your own, like [`with_backward`] for several
/// outputs.
///
/// `backward` gets the outputs and their gradients, with `None` for an output that the pass did not
/// use. Integer outputs have no gradient, and are returned without a history.
///
/// # Errors
///
/// Returns the errors of [`with_backward`].
///
/// # Examples
///
/// A sum and a difference with a common backward:
///
/// ```
/// use candle_core::{Device, Var};
/// use fused_ops::with_backward_many;
///
/// let x = Var::new(3.0_f64, &Device::Cpu)?;
/// let y = Var::new(5.0_f64, &Device::Cpu)?;
/// let (a, b) = (x.as_detached_tensor(), y.as_detached_tensor());
/// let outputs = with_backward_many(&[&x, &y], &[(&a + &b)?, (&a - &b)?], |_, grads| {
///     let [Some(sum), Some(difference)] = &grads[..] else { panic!("both are used") };
///     Ok(vec![Some((sum + difference)?), Some((sum - difference)?)])
/// })?;
/// let grads = outputs[0].mul(&outputs[1])?.backward()?;
/// assert_eq!(grads.get(&x).unwrap().to_scalar::<f64>()?, 6.0);
/// assert_eq!(grads.get(&y).unwrap().to_scalar::<f64>()?, -10.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn with_backward_many<F>(
    inputs: &[&Tensor],
    outputs: &[Tensor],
    backward: F,
) -> Result<Vec<Tensor>>
where
    F: Fn(&[Tensor], Vec<Option<Tensor>>) -> candle_core::Result<Vec<Option<Tensor>>>
        + Send
        + Sync
        + 'static,
{
    let Some(tracked) = inputs.iter().find(|input| input.track_op()) else {
        return Ok(outputs.iter().map(Tensor::detach).collect());
    };
    let collected =
        Arc::new(CollectedGradients { outputs: OnceLock::new(), grads: Mailbox::default() });
    // In the backward pass, candle visits the token after all outputs, because each output has the
    // token as its input.
    let zeros = Tensor::zeros(outputs.len(), DType::F32, tracked.device())?;
    let token = with_backward(inputs, &zeros, {
        let collected = Arc::clone(&collected);
        move |_, token_grad| {
            let outputs = collected.outputs.get();
            let outputs = outputs.ok_or_else(|| candle_core::Error::msg("an output is missing"))?;
            let mut grads = vec![None; outputs.len()];
            for (index, grad) in collected.grads.take(&token_grad)? {
                grads[index] = Some(grad);
            }
            backward(outputs, grads)
        }
    })?;
    let mut results = Vec::with_capacity(outputs.len());
    for (index, output) in outputs.iter().enumerate() {
        if !output.dtype().is_float() {
            results.push(output.detach());
            continue;
        }
        let collected = Arc::clone(&collected);
        let zeros = zeros.clone();
        results.push(with_backward(&[&token], output, move |_, grad| {
            let token_grad = collected.grads.leave(index, grad, &zeros)?;
            Ok(vec![Some(token_grad)])
        })?);
    }
    // Store the outputs without their history, since a history would refer back to them and never
    // be freed.
    collected.outputs.get_or_init(|| results.iter().map(Tensor::detach).collect());
    Ok(results)
}

/// The outputs of one operation, and their gradients in the current backward pass.
struct CollectedGradients {
    /// Set before any backward pass begins.
    outputs: OnceLock<Vec<Tensor>>,
    /// Gradients that the outputs pass to the token.
    grads: Mailbox<Tensor>,
}

struct CustomBackward<F> {
    backward: F,
    /// The use of each input's gradient.
    grad_uses: Vec<GradientUse>,
}

/// The use of an input's gradient in candle's backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GradientUse {
    /// The input is not tracked: candle would store the gradient without using it.
    Dropped,
    /// The input is a variable, which may have no gradient.
    Optional,
    /// The input is a tracked result: candle panics if it has no gradient.
    Required,
}

impl GradientUse {
    fn new(input: &Tensor) -> Self {
        match (input.track_op(), input.is_variable()) {
            (false, _) => Self::Dropped,
            (true, true) => Self::Optional,
            (true, false) => Self::Required,
        }
    }
}

impl<F> MultiBackward<1> for CustomBackward<F>
where
    F: Fn(&Tensor, Tensor) -> candle_core::Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
{
    const NAME: &'static str = "with_backward";
    const GRADS_MAY_ALIAS: bool = true;

    fn backward(
        &self,
        [output]: &[Tensor; 1],
        [grad]: [Option<Tensor>; 1],
    ) -> Result<Vec<Option<Tensor>>> {
        // candle calls an operation only for a gradient of its output.
        let output_grad =
            grad.ok_or_else(|| candle_core::Error::msg("an output has no gradient"))?;
        let mut grads = (self.backward)(output, output_grad)?;
        if grads.len() != self.grad_uses.len() {
            return Err(candle_core::Error::msg(format!(
                "{} gradients for an operation of {} inputs",
                grads.len(),
                self.grad_uses.len()
            ))
            .into());
        }
        for (input, (grad, grad_use)) in grads.iter_mut().zip(&self.grad_uses).enumerate() {
            match grad_use {
                GradientUse::Dropped => *grad = None,
                GradientUse::Required if grad.is_none() => {
                    let message = format!("input {input} got no gradient");
                    return Err(candle_core::Error::msg(message).into());
                }
                GradientUse::Optional | GradientUse::Required => {}
            }
        }
        Ok(grads)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    fn var(value: f64) -> Var {
        Var::new(value, &Device::Cpu).unwrap()
    }

    #[test]
    fn inputs_get_their_own_gradients() {
        for n_inputs in 1..9_usize {
            let vars: Vec<Var> = (0..n_inputs).map(|n| var(n as f64)).collect();
            // Every second input is not a variable itself.
            let inputs: Vec<Tensor> = vars
                .iter()
                .enumerate()
                .map(
                    |(n, var)| {
                        if n % 2 == 0 { var.as_tensor().clone() } else { var.sqr().unwrap() }
                    },
                )
                .collect();
            let refs: Vec<&Tensor> = inputs.iter().collect();
            let output = Tensor::new(7.0_f64, &Device::Cpu).unwrap();
            let y = with_backward(&refs, &output, move |output, grad| {
                assert_eq!(output.to_vec0::<f64>()?.to_bits(), 7_f64.to_bits());
                (0..n_inputs).map(|n| (&grad * (n as f64 + 1.0)).map(Some)).collect()
            });
            let grads = (y.unwrap() * 10.0).unwrap().backward().unwrap();
            for (n, var) in vars.iter().enumerate() {
                let inner = if n % 2 == 0 { 1.0 } else { 2.0 * n as f64 };
                let found: f64 = grads.get(var).unwrap().to_scalar().unwrap();
                let off = found - 10.0 * (n as f64 + 1.0) * inner;
                assert!(off.abs() < 1e-12, "input {n} of {n_inputs}: {found}");
            }
        }
    }

    /// Returns three outputs, each the sum of three inputs.
    fn sums(vars: &[Var; 3]) -> Vec<Tensor> {
        let [a, b, c] = vars.each_ref().map(Var::as_detached_tensor);
        let sum = ((a + b).unwrap() + c).unwrap();
        let count = Tensor::new(3_u32, &Device::Cpu).unwrap();
        let outputs = [sum.clone(), (&sum * 2.0).unwrap(), count, (&sum * 3.0).unwrap()];
        let inputs = vars.each_ref().map(Var::as_tensor);
        with_backward_many(&inputs, &outputs, |outputs, grads| {
            assert_eq!(outputs.len(), grads.len());
            let mut all = outputs[0].zeros_like()?;
            for (grad, factor) in grads.into_iter().zip([1.0, 2.0, f64::NAN, 3.0]) {
                all = match grad {
                    Some(grad) => (all + (grad * factor)?)?,
                    None => all,
                };
            }
            Ok(vec![Some(all.clone()), Some((&all * 10.0)?), Some((all * 100.0)?)])
        })
        .unwrap()
    }

    #[test]
    fn every_used_output_contributes() {
        let vars = [1.0, 2.0, 3.0].map(var);
        let used: [(&[usize], f64); 5] =
            [(&[0], 1.0), (&[1], 2.0), (&[0, 3], 4.0), (&[0, 1, 3], 6.0), (&[3, 3], 6.0)];
        for (used, slope) in used {
            let outputs = sums(&vars);
            assert!(!outputs[2].track_op(), "integers have no gradient");
            let one = Tensor::new(1.0_f64, &Device::Cpu).unwrap();
            let seeds = used.iter().map(|&output| (outputs[output].clone(), one.clone()));
            let grads = backward_from_many(seeds).unwrap();
            for (var, factor) in vars.iter().zip([1.0, 10.0, 100.0]) {
                let found: f64 = grads.get(var).unwrap().to_scalar().unwrap();
                assert!((found - slope * factor).abs() < 1e-9, "{used:?}: {found}");
            }
        }
        assert!(backward_from_many([]).unwrap().get(&vars[0]).is_none());
    }

    #[test]
    fn outputs_do_not_retain_each_other() {
        let alive = Arc::new(());
        let x = var(1.0);
        let held = Arc::clone(&alive);
        let outputs = [x.as_detached_tensor(), x.as_detached_tensor()];
        let outputs = with_backward_many(&[&x], &outputs, move |_, grads| {
            let _ = &held;
            Ok(vec![grads.into_iter().flatten().next()])
        });
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(outputs.unwrap());
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn untracked_inputs_record_nothing() {
        let x = var(1.0).as_detached_tensor();
        let y = with_backward(&[&x], &x, |_, _| unreachable!("nothing is differentiated")).unwrap();
        assert!(!y.track_op());
        let y = with_backward_many(&[&x], std::slice::from_ref(&x), |_, _| unreachable!());
        assert!(!y.unwrap()[0].track_op());
    }

    #[test]
    fn missing_gradients_are_errors() {
        let x = var(2.0);
        let squared = x.sqr().unwrap();
        let error = |inputs: &[&Tensor], count: usize| {
            let y =
                with_backward(inputs, &x.as_detached_tensor(), move |_, _| Ok(vec![None; count]));
            y.unwrap().backward().unwrap_err().to_string()
        };
        assert!(error(&[&x, &squared], 2).contains("input 1 got no gradient"));
        assert!(error(&[&x, &squared], 1).contains("1 gradients for an operation of 2 inputs"));
        let wrong =
            backward_from_many([(squared.clone(), Tensor::new(&[1.0_f64], &Device::Cpu).unwrap())]);
        assert!(wrong.unwrap_err().to_string().contains("of shape [1]"));
        let y = with_backward(&[&x], &squared, |_, _| Ok(vec![None])).unwrap();
        assert!(y.backward().unwrap().get(&x).is_none());
    }
}
