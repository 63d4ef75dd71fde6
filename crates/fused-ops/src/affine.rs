//! The function of a linear layer: its product, with a bias and a low-rank adapter.

use candle_core::{DType, Shape, Tensor};

use crate::{
    autograd::{CpuSlice, cpu_tensor},
    composed,
    custom::with_backward,
    error::{Error, Result},
    kernels::{
        float::Float,
        linear::{
            add_bias,
            low_rank::{LowRankMatrix, sum_products, transposed},
            sum_rows,
        },
        matmul::{MatrixView, product},
    },
    route::{Named, Route, check_shape, is_half},
    weight::{input_grad, parameter_grad, times_weight},
};

/// The function x·weightᵀ + bias, and with an adapter + scale·(x·Aᵀ)·Bᵀ.
///
/// The weight of a layer with an adapter is frozen: it has no gradient, and may have another dtype
/// than the other tensors.
#[derive(Clone, Debug)]
pub(crate) struct AffineLayer {
    /// [outputs, inputs]
    weight: Tensor,
    /// \[outputs\]
    bias: Option<Tensor>,
    adapter: Option<Adapter>,
}

/// A low-rank addition to a weight: scale·B·A.
#[derive(Clone, Debug)]
struct Adapter {
    /// [rank, inputs]
    a: Tensor,
    /// [outputs, rank]
    b: Tensor,
    scale: f64,
}

impl AffineLayer {
    pub(crate) fn new(weight: &Tensor, bias: Option<&Tensor>) -> Self {
        Self { weight: weight.clone(), bias: bias.cloned(), adapter: None }
    }

    /// Freezes the weight, and adds an adapter with the matrices `a` and `b`.
    pub(crate) fn with_adapter(self, a: &Tensor, b: &Tensor, scale: f64) -> Self {
        let adapter = Adapter { a: a.clone(), b: b.clone(), scale };
        Self { weight: self.weight.detach(), adapter: Some(adapter), ..self }
    }

    pub(crate) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the layer of some outputs, without copies.
    pub(crate) fn narrow(&self, start: usize, outputs: usize) -> Result<Self> {
        let part = |tensor: &Tensor| tensor.narrow(0, start, outputs);
        let adapter = self.adapter.as_ref().map(|adapter| -> Result<_> {
            Ok(Adapter { b: part(&adapter.b)?, ..adapter.clone() })
        });
        Ok(Self {
            weight: part(&self.weight)?,
            bias: self.bias.as_ref().map(part).transpose()?,
            adapter: adapter.transpose()?,
        })
    }

    pub(crate) fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns true if the layer has neither a bias nor an adapter.
    pub(crate) fn is_product(&self) -> bool {
        self.bias.is_none() && self.adapter.is_none()
    }

    /// Checks the shapes for a number of inputs, and whether an adapter fits the tensor `x` that the
    /// operation gets. Returns the number of outputs.
    pub(crate) fn check(
        &self,
        op: &'static str,
        [weight_name, bias_name]: [&'static str; 2],
        x: &Tensor,
        inputs: usize,
    ) -> Result<usize> {
        let Some(&outputs) = self.weight.dims().first() else {
            let expected = format!("[outputs, {inputs}]");
            return Err(Error::Shape { op, input: weight_name, found: Vec::new(), expected });
        };
        check_shape(op, weight_name, &self.weight, &[outputs, inputs])?;
        if let Some(bias) = &self.bias {
            check_shape(op, bias_name, bias, &[outputs])?;
        }
        if let Some(Adapter { a, b, .. }) = &self.adapter {
            let rank = a.dims().first().copied().unwrap_or_default();
            check_shape(op, "a", a, &[rank, inputs])?;
            check_shape(op, "b", b, &[outputs, rank])?;
            Route::new(op, &[(weight_name, &self.weight)])?;
            let x = Some(("x", x)).filter(|_| !is_half(x.dtype()));
            Route::new(op, &x.into_iter().chain([("a", a), ("b", b)]).collect::<Vec<_>>())?;
        }
        Ok(outputs)
    }

    /// Returns the tensors that must have the dtype of the layer's input.
    pub(crate) fn named(&self, [weight, bias]: [&'static str; 2]) -> Vec<Named<'_>> {
        let weight = Some((weight, &self.weight)).filter(|_| self.adapter.is_none());
        weight.into_iter().chain(self.bias.as_ref().map(|tensor| (bias, tensor))).collect()
    }

    /// Returns the layer with its bias and adapter in single precision. The kernels widen the weight.
    pub(crate) fn to_f32(&self) -> Result<Self> {
        self.map_others(|tensor| tensor.to_dtype(DType::F32))
    }

    /// Returns the layer with contiguous tensors.
    pub(crate) fn contiguous(&self) -> Result<Self> {
        Ok(Self { weight: self.weight.contiguous()?, ..self.map_others(Tensor::contiguous)? })
    }

    /// Returns the layer with `f` of all its tensors but the weight.
    fn map_others(&self, f: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> Result<Self> {
        let adapter = match &self.adapter {
            Some(Adapter { a, b, scale }) => Some(Adapter { a: f(a)?, b: f(b)?, scale: *scale }),
            None => None,
        };
        let bias = self.bias.as_ref().map(f).transpose()?;
        Ok(Self { weight: self.weight.clone(), bias, adapter })
    }

    /// Returns the tensors that may have gradients: weight, bias, A and B. A frozen weight is left
    /// out.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let weight = Some(&self.weight).filter(|_| self.adapter.is_none());
        let matrices = self.adapter.iter().flat_map(|adapter| [&adapter.a, &adapter.b]);
        weight.into_iter().chain(&self.bias).chain(matrices)
    }

    /// Returns the shape of the result for `x` [.., inputs].
    pub(crate) fn output_shape(&self, x: &Tensor) -> Shape {
        Shape::from([&x.dims()[..x.rank() - 1], &self.weight.dims()[..1]].concat())
    }

    /// Returns the result for the rows of `x`.
    pub(crate) fn forward<T: Float>(&self, x: &[T], rows: usize) -> Result<Vec<T>> {
        let mut y = times_weight(&self.weight, x, rows)?;
        if let Some(bias) = &self.bias {
            add_bias(&mut y, CpuSlice::new(bias).as_slice()?);
        }
        if let Some(adapter) = &self.adapter {
            let low = adapter.reduce_inputs(x, rows)?;
            adapter.with_transposed_b(|b| b.expand_add(&mut y, &low, rows))?;
        }
        Ok(y)
    }

    /// Prepares the gradient of the result for the gradients of inputs and parameters.
    pub(crate) fn output_grad<'a, T: Float>(
        &self,
        grad: &'a [T],
        rows: usize,
    ) -> Result<OutputGrad<'a, T>> {
        let low = self.adapter.as_ref().map(|adapter| adapter.reduce_grad(grad, rows));
        Ok(OutputGrad { grad, low: low.transpose()?.unwrap_or_default(), rows })
    }

    /// Returns the gradients of x and of [`tensors`](Self::tensors), for the result's `grad`.
    pub(crate) fn backward<T: Float>(&self, x: &Tensor, grad: &[T]) -> Result<Vec<Option<Tensor>>> {
        let grad = self.output_grad(grad, n_rows(x))?;
        let grad_x = x.track_op().then(|| cpu_tensor(self.backward_x(&grad)?, x.shape()));
        let mut all = vec![grad_x.transpose()?];
        all.extend(self.backward_parameters(CpuSlice::new(x).as_slice()?, &grad)?);
        Ok(all)
    }

    /// Returns the gradient of x.
    pub(crate) fn backward_x<T: Float>(&self, grad: &OutputGrad<'_, T>) -> Result<Vec<T>> {
        let mut grad_x = input_grad(&self.weight, grad.grad, grad.rows)?;
        if let Some(adapter) = &self.adapter {
            adapter.with_a(|a| a.expand_add(&mut grad_x, &grad.low, grad.rows))?;
        }
        Ok(grad_x)
    }

    /// Returns the gradients of [`tensors`](Self::tensors). Gradients of frozen parameters are
    /// skipped, which saves products.
    pub(crate) fn backward_parameters<T: Float>(
        &self,
        x: &[T],
        grad: &OutputGrad<'_, T>,
    ) -> Result<Vec<Option<Tensor>>> {
        let rows = grad.rows;
        let (outputs, inputs) = self.weight.dims2()?;
        let grads = MatrixView::contiguous(grad.grad, rows, outputs);
        let mut all = Vec::new();
        if self.adapter.is_none() {
            let x = MatrixView::contiguous(x, rows, inputs);
            all.push(parameter_grad(&self.weight, || Ok(product(grads.t(), x)))?);
        }
        if let Some(bias) = &self.bias {
            all.push(parameter_grad(bias, || Ok(sum_rows(grad.grad, outputs)))?);
        }
        if let Some(adapter) = &self.adapter {
            let rank = adapter.a.dims()[0];
            all.push(parameter_grad(&adapter.a, || {
                Ok(sum_products(&grad.low, rank, x, inputs, rows))
            })?);
            all.push(parameter_grad(&adapter.b, || {
                let low = adapter.reduce_inputs(x, rows)?;
                Ok(transposed(&sum_products(&low, rank, grad.grad, outputs, rows), outputs))
            })?);
        }
        Ok(all)
    }

    /// Returns the result by candle's operations.
    ///
    /// Without the kernels, a frozen weight of another dtype is widened whole for the time of a
    /// product.
    pub(crate) fn composed(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let bias = self.bias.as_ref();
        let Some(Adapter { a, b, scale }) = &self.adapter else {
            return composed::linear(x, &self.weight, bias, None);
        };
        let dtype = if is_half(x.dtype()) { DType::F32 } else { x.dtype() };
        let wide = x.to_dtype(dtype)?;
        let low = wide.broadcast_matmul(&a.to_dtype(dtype)?.t()?)?;
        let adapted = (low.broadcast_matmul(&b.to_dtype(dtype)?.t()?)? * *scale)?;
        let y = (frozen_product(&wide, &self.weight)? + adapted)?;
        let y = match bias {
            Some(bias) => y.broadcast_add(&bias.to_dtype(dtype)?)?,
            None => y,
        };
        y.to_dtype(x.dtype())
    }
}

impl Adapter {
    /// Returns scale·x·Aᵀ.
    fn reduce_inputs<T: Float>(&self, x: &[T], rows: usize) -> Result<Vec<T>> {
        Ok(self.scaled(self.with_a(|a| a.reduce(x, rows))?))
    }

    /// Returns scale·grad·B.
    fn reduce_grad<T: Float>(&self, grad: &[T], rows: usize) -> Result<Vec<T>> {
        Ok(self.scaled(self.with_transposed_b(|b| b.reduce(grad, rows))?))
    }

    fn with_a<T: Float, R>(&self, f: impl FnOnce(LowRankMatrix<'_, T>) -> R) -> Result<R> {
        let (rank, inputs) = self.a.dims2()?;
        Ok(f(LowRankMatrix::new(CpuSlice::new(&self.a).as_slice()?, rank, inputs)))
    }

    fn with_transposed_b<T: Float, R>(
        &self,
        f: impl FnOnce(LowRankMatrix<'_, T>) -> R,
    ) -> Result<R> {
        let (outputs, rank) = self.b.dims2()?;
        let items = transposed(CpuSlice::new(&self.b).as_slice()?, rank);
        Ok(f(LowRankMatrix::new(&items, rank, outputs)))
    }

    fn scaled<T: Float>(&self, mut items: Vec<T>) -> Vec<T> {
        let scale = T::round_from_f64(self.scale);
        for item in &mut items {
            *item *= scale;
        }
        items
    }
}

/// The gradient of a layer's result.
pub(crate) struct OutputGrad<'a, T> {
    grad: &'a [T],
    /// scale·grad·B [rows, rank], empty without an adapter.
    low: Vec<T>,
    rows: usize,
}

/// Returns x·weightᵀ by candle's operations, with a gradient of `x` only. candle's own product would
/// make one of the weight too.
fn frozen_product(x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
    let dtype = x.dtype();
    let y = x.detach().broadcast_matmul(&weight.to_dtype(dtype)?.t()?)?;
    let weight = weight.clone();
    let y = with_backward(&[x], &y, move |_, grad| {
        Ok(vec![Some(grad.broadcast_matmul(&weight.to_dtype(dtype)?)?)])
    });
    Ok(y?)
}

/// Returns the number of rows: the product of all dimensions but the last, since rows may have
/// width 0.
pub(crate) fn n_rows(x: &Tensor) -> usize {
    x.dims()[..x.rank() - 1].iter().product()
}
