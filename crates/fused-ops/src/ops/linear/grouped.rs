//! Linear layers of experts: rows are sorted by expert, and each group has its own weight.
//!
//! No row is padded and none dropped, as in Gale et al., arXiv 2211.15841.

use std::{marker::PhantomData, ops::Range};

use candle_core::{DType, Result as CandleResult, Shape, Tensor};

use crate::{
    autograd::{Backward, CpuSlice, cpu_tensor, record},
    custom::with_backward,
    error::{Error, Result},
    kernels::{
        float::Float,
        matmul::{MatrixLayout, MatrixView, StoreMode, multiply_in_pool},
    },
    route::{Route, check_shape},
    weight::{grad_of, input_grad, write_times_weight},
};

const OP: &str = "grouped_linear";

/// The weights of experts, all [outputs, inputs].
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_enums, reason = "weights are in one tensor or in several")]
pub enum ExpertWeights<'a> {
    /// A matrix for each expert.
    Separate(&'a [Tensor]),
    /// The matrices of all experts, [experts, outputs, inputs].
    Stacked(&'a Tensor),
}

/// Multiplies each row of `x` by the weight of its expert: x·weightᵀ, as in a mixture of experts.
///
/// The rows are sorted by expert: the first `counts[0]` rows belong to expert 0, the next `counts[1]` to
/// expert 1, and so on. An expert without rows costs nothing but zeros for its gradient.
///
/// # Shapes
///
/// `x` [rows, inputs], `counts` \[experts\] with the sum `rows`; the result is [rows, outputs].
///
/// # Dtypes
///
/// A frozen weight may have any floating type; its elements are converted as in
/// [`lora_linear`](crate::lora_linear()).
///
/// # Determinism
///
/// Like [`linear`](crate::linear()). A row has the bits of [`linear`](crate::linear()) with its expert's
/// weight, and they do not depend on the rows of other experts.
///
/// # Errors
///
/// [`Shape`](Error::Shape) if shapes or counts do not fit, [`DType`](Error::DType) if a tracked weight
/// has another type than `x`, or a tensor has no floating type, and [`Device`](Error::Device) if tensors
/// are on different devices.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fused_ops::{ExpertWeights, grouped_linear};
///
/// // Two experts; the first has one row, the second two.
/// let x = Tensor::new(&[[1.0_f32], [2.0], [3.0]], &Device::Cpu)?;
/// let weight = Var::new(&[[[10.0_f32]], [[100.0]]], &Device::Cpu)?;
/// let y = grouped_linear(&x, ExpertWeights::Stacked(&weight), &[1, 2])?;
/// assert_eq!(y.to_vec2::<f32>()?, [[10.0], [200.0], [300.0]]);
/// let grads = y.sum_all()?.backward()?;
/// assert_eq!(grads.get(&weight).unwrap().to_vec3::<f32>()?, [[[1.0]], [[5.0]]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn grouped_linear(x: &Tensor, weights: ExpertWeights<'_>, counts: &[usize]) -> Result<Tensor> {
    let groups = RowGroups::new(x, weights, counts)?;
    match groups.route(x)? {
        Route::F32 => fused::<f32>(x, groups),
        Route::F64 => fused::<f64>(x, groups),
        Route::Half(half) => Ok(fused::<f32>(&x.to_dtype(DType::F32)?, groups)?.to_dtype(half)?),
        Route::Composed => groups.composed(x),
    }
}

/// The rows of each expert, with its weight.
struct RowGroups {
    /// One tensor for all experts, or one for each.
    weights: Vec<Tensor>,
    is_stacked: bool,
    counts: Vec<usize>,
    outputs: usize,
    inputs: usize,
}

impl RowGroups {
    fn new(x: &Tensor, weights: ExpertWeights<'_>, counts: &[usize]) -> Result<Self> {
        let shape = |input, found: &[usize], expected: String| {
            Err(Error::Shape { op: OP, input, found: found.to_vec(), expected })
        };
        let &[rows, inputs] = x.dims() else {
            return shape("x", x.dims(), "[rows, inputs]".to_owned());
        };
        let (weights, is_stacked) = match weights {
            ExpertWeights::Separate(weights) => (weights.to_vec(), false),
            ExpertWeights::Stacked(weight) => (vec![weight.clone()], true),
        };
        let Some([.., outputs, _]) = weights.first().map(Tensor::dims) else {
            return shape("weights", &[], format!("at least one [outputs, {inputs}]"));
        };
        let (outputs, n_experts) = (*outputs, counts.len());
        if counts.iter().sum::<usize>() != rows || !is_stacked && n_experts != weights.len() {
            let expected = format!("the rows of each expert, {rows} in all");
            return shape("counts", counts, expected);
        }
        let stacked = [n_experts, outputs, inputs];
        for weight in &weights {
            check_shape(OP, "weights", weight, &stacked[usize::from(!is_stacked)..])?;
        }
        Ok(Self { weights, is_stacked, counts: counts.to_vec(), outputs, inputs })
    }

    /// Checks the types and devices. Frozen weights may have any floating type.
    fn route(&self, x: &Tensor) -> Result<Route> {
        let (same, other): (Vec<_>, Vec<_>) =
            (self.weights.iter().map(|weight| ("weights", weight)))
                .partition(|(_, weight)| weight.track_op() || weight.dtype() == x.dtype());
        for weight in other {
            Route::new(OP, &[weight])?;
        }
        Route::new(OP, &[&[("x", x)], &same[..]].concat())
    }

    /// Returns the experts that have rows, with their rows.
    fn groups(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let ranges = self.counts.iter().scan(0, |end, count| {
            let start = *end;
            *end += count;
            Some(start..*end)
        });
        ranges.enumerate().filter(|(_, rows)| !rows.is_empty())
    }

    /// Returns the matrix of an expert, without its history.
    fn matrix(&self, expert: usize) -> CandleResult<Tensor> {
        let matrix = if self.is_stacked {
            self.weights[0].get(expert)?
        } else {
            self.weights[expert].clone()
        };
        Ok(matrix.detach())
    }

    /// Returns x·weightᵀ.
    fn forward<T: Float>(&self, x: &[T]) -> Result<Vec<T>> {
        let mut y = vec![T::ZERO; self.counts.iter().sum::<usize>() * self.outputs];
        for (expert, rows) in self.groups() {
            let x = rows_of(x, &rows, self.inputs);
            let y = &mut y[rows.start * self.outputs..];
            write_times_weight(&self.matrix(expert)?, x, rows.len(), y)?;
        }
        Ok(y)
    }

    /// Returns the gradient of x.
    fn backward_x<T: Float>(&self, grad: &[T]) -> Result<Vec<T>> {
        let mut grad_x = Vec::with_capacity(self.counts.iter().sum::<usize>() * self.inputs);
        for (expert, rows) in self.groups() {
            let grad = rows_of(grad, &rows, self.outputs);
            grad_x.extend(input_grad(&self.matrix(expert)?, grad, rows.len())?);
        }
        Ok(grad_x)
    }

    /// Returns the gradients of the weights that are not frozen.
    fn backward_weights<T: Float>(&self, x: &[T], grad: &[T]) -> Result<Vec<Option<Tensor>>> {
        let zeros = |weight: &Tensor| weight.track_op().then(|| vec![T::ZERO; weight.elem_count()]);
        let mut grads: Vec<_> = self.weights.iter().map(zeros).collect();
        let layout = MatrixLayout::rows(self.outputs, self.inputs, self.inputs);
        for (expert, rows) in self.groups() {
            let (tensor, matrix) = if self.is_stacked { (0, expert) } else { (expert, 0) };
            let Some(out) = &mut grads[tensor] else { continue };
            let part = |data, width| {
                MatrixView::contiguous(rows_of(data, &rows, width), rows.len(), width)
            };
            let out = &mut out[matrix * self.outputs * self.inputs..];
            let (grad, x) = (part(grad, self.outputs), part(x, self.inputs));
            multiply_in_pool(out, layout, grad.t(), x, StoreMode::Set);
        }
        let pairs = self.weights.iter().zip(grads);
        pairs.map(|(weight, grad)| grad.map(|grad| grad_of(weight, grad)).transpose()).collect()
    }

    /// Returns the result by candle's operations.
    fn composed(self, x: &Tensor) -> Result<Tensor> {
        let inputs: Vec<_> = [x].into_iter().chain(&self.weights).cloned().collect();
        let x = x.detach();
        let y = self.map_groups(&x, self.outputs, |x, matrix| x.matmul(&matrix.t()?))?;
        with_backward(&inputs.iter().collect::<Vec<_>>(), &y, move |_, grad| {
            let grad = grad.contiguous()?;
            let grad_x = self.map_groups(&grad, self.inputs, Tensor::matmul)?;
            let mut grads = vec![Some(grad_x)];
            let no_grad = Tensor::zeros((self.outputs, self.inputs), x.dtype(), x.device())?;
            let mut matrices = vec![no_grad; self.counts.len()];
            for (expert, rows) in self.groups() {
                let part = |data: &Tensor| data.narrow(0, rows.start, rows.len());
                matrices[expert] = part(&grad)?.t()?.matmul(&part(&x)?)?;
            }
            let matrices =
                if self.is_stacked { vec![Tensor::stack(&matrices, 0)?] } else { matrices };
            grads.extend(matrices.into_iter().map(Some));
            Ok(grads)
        })
    }

    /// Returns `f` of the rows of each expert and its matrix, joined to rows of `width`.
    fn map_groups(
        &self,
        x: &Tensor,
        width: usize,
        f: impl Fn(&Tensor, &Tensor) -> CandleResult<Tensor>,
    ) -> CandleResult<Tensor> {
        let product = |(expert, rows): (usize, Range<usize>)| {
            let matrix = self.matrix(expert)?.to_dtype(x.dtype())?;
            f(&x.narrow(0, rows.start, rows.len())?, &matrix)
        };
        let parts = self.groups().map(product).collect::<CandleResult<Vec<_>>>()?;
        if parts.is_empty() {
            return Tensor::zeros((0, width), x.dtype(), x.device());
        }
        Tensor::cat(&parts, 0)
    }
}

/// Returns some rows of `width` elements.
fn rows_of<'a, T>(data: &'a [T], rows: &Range<usize>, width: usize) -> &'a [T] {
    &data[rows.start * width..rows.end * width]
}

fn fused<T: Float>(x: &Tensor, groups: RowGroups) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let weights = groups.weights.iter().map(Tensor::contiguous).collect::<CandleResult<_>>()?;
    let groups = RowGroups { weights, ..groups };
    let y = groups.forward::<T>(CpuSlice::new(x).as_slice()?)?;
    let shape = Shape::from((x.dims()[0], groups.outputs));
    let inputs: Vec<_> = [x].into_iter().chain(&groups.weights).cloned().collect();
    let backward = GroupedLinear::<T> { groups, float: PhantomData };
    record(&inputs.iter().collect::<Vec<_>>(), y, shape, backward)
}

struct GroupedLinear<T> {
    groups: RowGroups,
    float: PhantomData<T>,
}

impl<T: Float> Backward for GroupedLinear<T> {
    const NAME: &'static str = "fused-grouped-linear";

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let x = inputs[0];
        let grad = CpuSlice::new(grad);
        let grad = grad.as_slice::<T>()?;
        let grad_x = x.track_op().then(|| cpu_tensor(self.groups.backward_x(grad)?, x.shape()));
        let mut all = vec![grad_x.transpose()?];
        all.extend(self.groups.backward_weights(CpuSlice::new(x).as_slice()?, grad)?);
        Ok(all)
    }
}
