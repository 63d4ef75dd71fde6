//! A gated feed-forward network in one step: two linear layers, SwiGLU, a linear layer.

use candle_core::Tensor;

use crate::{
    autograd::{CpuSlice, MultiBackward, cpu_tensor, record_many},
    composed,
    error::Result,
    kernels::{activation as kernel, float::Float, norm},
    ops::linear::{AffineLayer, check_weight, n_rows},
    route::{check_shape, last_dim, route},
};

const OP: &str = "swiglu_mlp";

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
    let inputs = last_dim(OP, "x", x)?;
    let width = check_weight(OP, "gate_weight", gate_weight, inputs)?;
    check_shape(OP, "up_weight", up_weight, &[width, inputs])?;
    let outputs = check_weight(OP, "down_weight", down_weight, width)?;
    let Some(residual) = residual else {
        return route!(
            "swiglu_mlp",
            [x, gate_weight, up_weight, down_weight],
            fused(&[x, gate_weight, up_weight, down_weight]),
            composed::swiglu_mlp(x, gate_weight, up_weight, down_weight, None),
        );
    };
    check_shape(OP, "residual", residual, &[&x.dims()[..x.rank() - 1], &[outputs]].concat())?;
    route!(
        "swiglu_mlp",
        [x, gate_weight, up_weight, down_weight, residual],
        fused(&[x, gate_weight, up_weight, down_weight, residual]),
        composed::swiglu_mlp(x, gate_weight, up_weight, down_weight, Some(residual)),
    )
}

/// Applies the network. `inputs` are x, the three weights and, if there is one, the residual.
fn fused<T: Float>(inputs: &[&Tensor]) -> Result<Tensor> {
    let contiguous: Vec<_> =
        inputs.iter().map(|input| input.contiguous()).collect::<Result<_, _>>()?;
    let inputs: Vec<_> = contiguous.iter().collect();
    let x = inputs[0];
    let [gate, up, down] = [1, 2, 3].map(|layer| AffineLayer::new(inputs[layer], None));
    let rows = n_rows(x);
    let x_slice = CpuSlice::new(x);
    let gate_out = gate.forward::<T>(x_slice.as_slice()?, rows)?;
    let up_out = up.forward::<T>(x_slice.as_slice()?, rows)?;
    let mut y = down.forward(&kernel::swiglu(&gate_out, &up_out), rows)?;
    if let Some(residual) = inputs.get(4) {
        y = norm::add(&y, CpuSlice::new(residual).as_slice()?);
    }
    let shape = down.output_shape(x);
    if !inputs.iter().any(|input| input.track_op()) {
        return cpu_tensor(y, &shape);
    }
    let has_residual = inputs.len() == 5;
    let backward = SwiGluMlp { x: x.clone(), gate, gate_out, up, up_out, down, has_residual };
    let [y] = record_many(&inputs, [y], &shape, backward)?;
    Ok(y)
}

struct SwiGluMlp<T> {
    x: Tensor,
    gate: AffineLayer,
    gate_out: Vec<T>,
    up: AffineLayer,
    up_out: Vec<T>,
    down: AffineLayer,
    has_residual: bool,
}

impl<T: Float> SwiGluMlp<T> {
    /// Returns the gradients of the results of gate and up, where `grad` is the gradient of
    /// silu(gate) · up.
    fn gate_and_up_grads(&self, grad: &[T]) -> (Vec<T>, Vec<T>) {
        let grad_gate = kernel::swiglu_gate_backward(&self.gate_out, &self.up_out, grad);
        // silu(gate) · up is linear in `up`.
        (grad_gate, kernel::swiglu(&self.gate_out, grad))
    }

    /// Returns the gradient of x, summed over both layers.
    fn grad_x(&self, grad_gate: &[T], grad_up: &[T], rows: usize) -> Result<Tensor> {
        let through_gate = cpu_tensor(self.gate.backward_x(grad_gate, rows)?, self.x.shape())?;
        let through_up = cpu_tensor(self.up.backward_x(grad_up, rows)?, self.x.shape())?;
        Ok((through_gate + through_up)?)
    }
}

impl<T: Float> MultiBackward<1> for SwiGluMlp<T> {
    const NAME: &'static str = "fused-swiglu-mlp";

    fn backward(
        &self,
        [y]: &[Tensor; 1],
        [grad]: [Option<Tensor>; 1],
    ) -> Result<Vec<Option<Tensor>>> {
        let grad = grad.map_or_else(|| y.zeros_like(), Ok)?;
        let rows = n_rows(&self.x);
        let grad_slice = CpuSlice::new(&grad);
        let grad_y = grad_slice.as_slice()?;
        let grad_product = self.down.backward_x(grad_y, rows)?;
        let (grad_gate, grad_up) = self.gate_and_up_grads(&grad_product);
        drop(grad_product);
        let product = kernel::swiglu(&self.gate_out, &self.up_out);
        let grad_down = self.down.backward_parameters(&product, grad_y, rows)?;
        drop(product);
        let grad_x = self.x.track_op().then(|| self.grad_x(&grad_gate, &grad_up, rows));
        let x = CpuSlice::new(&self.x);
        // In the order of the inputs.
        let mut all = vec![grad_x.transpose()?];
        all.extend(self.gate.backward_parameters(x.as_slice()?, &grad_gate, rows)?);
        all.extend(self.up.backward_parameters(x.as_slice()?, &grad_up, rows)?);
        all.extend(grad_down);
        all.extend(self.has_residual.then(|| Some(grad.clone())));
        Ok(all)
    }
}
