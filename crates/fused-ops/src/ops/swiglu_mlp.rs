//! A gated feed-forward network in one step: two linear layers, SwiGLU, a linear layer.

use candle_core::{DType, Tensor};

use crate::{
    affine::{AffineLayer, OutputGrad, n_rows},
    autograd::{Backward, CpuSlice, cpu_tensor, record},
    composed,
    config::Activation,
    error::Result,
    kernels::{activation as kernel, float::Float, norm},
    route::{Route, check_shape, last_dim},
};

const OP: &str = "swiglu_mlp";
const GATE: [&str; 2] = ["gate_weight", "gate_bias"];
const UP: [&str; 2] = ["up_weight", "up_bias"];
const DOWN: [&str; 2] = ["down_weight", "down_bias"];

/// Returns down(silu(gate(x)) · up(x)), the feed-forward network of Llama and its relatives: three
/// [`linear`](crate::linear()) layers around [`swiglu`](crate::swiglu()). The wide middle stays out
/// of candle's graph. A `residual` is added to the result.
///
/// The results of gate and up, the widest tensors of a block, are stored; the backward pass
/// recomputes their product.
///
/// # Shapes
///
/// `x` [.., inputs], `gate_weight` and `up_weight` [width, inputs], `down_weight` [outputs, width],
/// `residual` [.., outputs]; the result is [.., outputs].
///
/// # Determinism
///
/// Like [`linear`](crate::linear()). In `f32` and `f64` the result has the same bits as with
/// separate operations. In `f16` and `bf16` the fused kernels round only the result, and each
/// separate operation rounds.
///
/// # Errors
///
/// The errors of [`linear`](crate::linear()).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fused_ops::swiglu_mlp;
///
/// let x = Tensor::new(&[[1.0_f32, 2.0]], &Device::Cpu)?;
/// let gate = Tensor::new(&[[0.0_f32, 50.0], [0.0, 0.0]], &Device::Cpu)?;
/// let up = Tensor::new(&[[3.0_f32, 4.0], [5.0, 1.0]], &Device::Cpu)?;
/// let down = Tensor::new(&[[0.5_f32, 7.0]], &Device::Cpu)?;
/// let y = swiglu_mlp(&x, &gate, &up, &down, None)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[550.0]]); // 100 and 0 times 11 and 7
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn swiglu_mlp(
    x: &Tensor,
    gate_weight: &Tensor,
    up_weight: &Tensor,
    down_weight: &Tensor,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let weights = [gate_weight, up_weight, down_weight];
    let layers = weights.map(|weight| AffineLayer::new(weight, None));
    apply(x, layers.each_ref(), Activation::Silu, residual)
}

/// Applies the network of the layers gate, up and down, with or without biases and adapters, and with
/// any activation of the gate.
pub(crate) fn apply(
    x: &Tensor,
    [gate, up, down]: [&AffineLayer; 3],
    activation: Activation,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let inputs = last_dim(OP, "x", x)?;
    let width = gate.check(OP, GATE, x, inputs)?;
    up.check(OP, UP, x, inputs)?;
    check_shape(OP, UP[0], up.weight(), &[width, inputs])?;
    let outputs = down.check(OP, DOWN, x, width)?;
    if let Some(residual) = residual {
        check_shape(OP, "residual", residual, &[&x.dims()[..x.rank() - 1], &[outputs]].concat())?;
    }
    let named = [("x", x)].into_iter().chain(residual.map(|tensor| ("residual", tensor)));
    let named = named.chain(gate.named(GATE)).chain(up.named(UP)).chain(down.named(DOWN));
    match Route::new(OP, &named.collect::<Vec<_>>())? {
        Route::F32 => fused::<f32>(x, [gate, up, down], activation, residual),
        Route::F64 => fused::<f64>(x, [gate, up, down], activation, residual),
        Route::Half(half) => {
            let layers = [gate.to_f32()?, up.to_f32()?, down.to_f32()?];
            let residual = residual.map(|tensor| tensor.to_dtype(DType::F32)).transpose()?;
            let x = x.to_dtype(DType::F32)?;
            Ok(fused::<f32>(&x, layers.each_ref(), activation, residual.as_ref())?
                .to_dtype(half)?)
        }
        Route::Composed => {
            let (gate, up) = (gate.composed(x)?, up.composed(x)?);
            let y = down.composed(&composed::gated(activation, &gate, &up)?)?;
            Ok(residual.map_or(Ok(y.clone()), |residual| y + residual)?)
        }
    }
}

fn fused<T: Float>(
    x: &Tensor,
    [gate, up, down]: [&AffineLayer; 3],
    activation: Activation,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let [gate, up, down] = [gate.contiguous()?, up.contiguous()?, down.contiguous()?];
    let residual = residual.map(Tensor::contiguous).transpose()?;
    let parameters = gate.tensors().chain(up.tensors()).chain(down.tensors());
    let inputs: Vec<_> = [x].into_iter().chain(parameters).chain(&residual).cloned().collect();
    let inputs: Vec<_> = inputs.iter().collect();
    let rows = n_rows(x);
    let x_slice = CpuSlice::new(x);
    let gate_out = gate.forward::<T>(x_slice.as_slice()?, rows)?;
    let up_out = up.forward::<T>(x_slice.as_slice()?, rows)?;
    let mut y = down.forward(&kernel::gated(activation, &gate_out, &up_out), rows)?;
    if let Some(residual) = &residual {
        y = norm::add(&y, CpuSlice::new(residual).as_slice()?);
    }
    let shape = down.output_shape(x);
    if !inputs.iter().any(|input| input.track_op()) {
        return cpu_tensor(y, &shape);
    }
    let has_residual = residual.is_some();
    let backward = SwiGluMlp { gate, gate_out, up, up_out, down, activation, has_residual };
    record(&inputs, y, shape, backward)
}

struct SwiGluMlp<T> {
    gate: AffineLayer,
    gate_out: Vec<T>,
    up: AffineLayer,
    up_out: Vec<T>,
    down: AffineLayer,
    activation: Activation,
    has_residual: bool,
}

impl<T: Float> SwiGluMlp<T> {
    /// Returns the gradient of x, summed over both layers.
    fn grad_x(
        &self,
        x: &Tensor,
        grad_gate: &OutputGrad<'_, T>,
        grad_up: &OutputGrad<'_, T>,
    ) -> Result<Tensor> {
        let through_gate = cpu_tensor(self.gate.backward_x(grad_gate)?, x.shape())?;
        let through_up = cpu_tensor(self.up.backward_x(grad_up)?, x.shape())?;
        Ok((through_gate + through_up)?)
    }
}

impl<T: Float> Backward for SwiGluMlp<T> {
    const NAME: &'static str = "fused-swiglu-mlp";

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let x = inputs[0];
        let rows = n_rows(x);
        let grad_slice = CpuSlice::new(grad);
        let grad_y = self.down.output_grad(grad_slice.as_slice()?, rows)?;
        let mut grad_up = self.down.backward_x(&grad_y)?;
        let [grad_gate, product] =
            kernel::gated_backward(self.activation, &self.gate_out, &self.up_out, &mut grad_up);
        let grad_down = self.down.backward_parameters(&product, &grad_y)?;
        drop(product);
        let grad_gate = self.gate.output_grad(&grad_gate, rows)?;
        let grad_up = self.up.output_grad(&grad_up, rows)?;
        let grad_x = x.track_op().then(|| self.grad_x(x, &grad_gate, &grad_up));
        let x = CpuSlice::new(x);
        // In the order of the inputs.
        let mut all = vec![grad_x.transpose()?];
        all.extend(self.gate.backward_parameters(x.as_slice()?, &grad_gate)?);
        all.extend(self.up.backward_parameters(x.as_slice()?, &grad_up)?);
        all.extend(grad_down);
        all.extend(self.has_residual.then(|| Some(grad.clone())));
        Ok(all)
    }
}
