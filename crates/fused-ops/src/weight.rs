//! Products with a weight [outputs, inputs] of any floating type.
//!
//! If the type differs from that of the product, blocks of the weight's rows are widened, so a copy in
//! the type of the product is never whole.

use candle_core::Tensor;

use crate::{
    autograd::{CpuSlice, cpu_tensor},
    error::Result,
    kernels::{
        float::Float,
        matmul::{MatrixLayout, MatrixView, StoreMode, multiply_in_pool, product},
    },
};

/// The rows that are widened at once: enough for fast products, and a small part of the weight.
const BLOCK_ROWS: usize = 256;

/// Returns x·weightᵀ for the rows of `x`.
pub(crate) fn times_weight<T: Float>(weight: &Tensor, x: &[T], rows: usize) -> Result<Vec<T>> {
    let (outputs, inputs) = weight.dims2()?;
    if weight.dtype() == T::DTYPE {
        let x = MatrixView::contiguous(x, rows, inputs);
        return Ok(product(x, Matrix::new(weight)?.view()?.t()));
    }
    let mut y = vec![T::ZERO; rows * outputs];
    write_times_weight(weight, x, rows, &mut y)?;
    Ok(y)
}

/// Writes x·weightᵀ to the start of `out`.
pub(crate) fn write_times_weight<T: Float>(
    weight: &Tensor,
    x: &[T],
    rows: usize,
    out: &mut [T],
) -> Result<()> {
    let (outputs, inputs) = weight.dims2()?;
    for_each_block(weight, |start, block: MatrixView<'_, T>| {
        let x = MatrixView::contiguous(x, rows, inputs);
        let layout = MatrixLayout::rows(rows, block.rows(), outputs);
        let out = out.get_mut(start..).unwrap_or_default();
        multiply_in_pool(out, layout, x, block.t(), StoreMode::Set);
    })
}

/// Returns grad·weight, the gradient of x, for the rows of `grad`.
pub(crate) fn input_grad<T: Float>(weight: &Tensor, grad: &[T], rows: usize) -> Result<Vec<T>> {
    let (outputs, inputs) = weight.dims2()?;
    if weight.dtype() == T::DTYPE {
        let grad = MatrixView::contiguous(grad, rows, outputs);
        return Ok(product(grad, Matrix::new(weight)?.view()?));
    }
    let mut grad_x = vec![T::ZERO; rows * inputs];
    for_each_block(weight, |start, block: MatrixView<'_, T>| {
        let columns = MatrixLayout::rows(rows, block.rows(), outputs);
        let grad = MatrixView::new(grad.get(start..).unwrap_or_default(), columns);
        let layout = MatrixLayout::rows(rows, inputs, inputs);
        multiply_in_pool(&mut grad_x, layout, grad, block, StoreMode::Add);
    })?;
    Ok(grad_x)
}

/// Returns the gradient of a parameter, or `None` if it is frozen.
pub(crate) fn parameter_grad<T: Float>(
    parameter: &Tensor,
    grad: impl FnOnce() -> Result<Vec<T>>,
) -> Result<Option<Tensor>> {
    if !parameter.track_op() {
        return Ok(None);
    }
    grad_of(parameter, grad()?).map(Some)
}

/// Makes the gradient of an input, which has its shape and type.
pub(crate) fn grad_of<T: Float>(input: &Tensor, grad: Vec<T>) -> Result<Tensor> {
    Ok(cpu_tensor(grad, input.shape())?.to_dtype(input.dtype())?)
}

/// Calls `f` with blocks of the weight's rows in type `T`, and the index of their first row.
fn for_each_block<T: Float>(
    weight: &Tensor,
    mut f: impl FnMut(usize, MatrixView<'_, T>),
) -> Result<()> {
    let outputs = weight.dims()[0];
    let block_rows = if weight.dtype() == T::DTYPE { outputs } else { BLOCK_ROWS };
    for start in (0..outputs).step_by(block_rows.max(1)) {
        let rows = block_rows.min(outputs - start);
        let block = weight.narrow(0, start, rows)?.detach().to_dtype(T::DTYPE)?;
        f(start, Matrix::new(&block)?.view()?);
    }
    Ok(())
}

/// The elements of a contiguous matrix.
struct Matrix<'a> {
    slice: CpuSlice<'a>,
    rows: usize,
    columns: usize,
}

impl<'a> Matrix<'a> {
    fn new(tensor: &'a Tensor) -> Result<Self> {
        let (rows, columns) = tensor.dims2()?;
        Ok(Self { slice: CpuSlice::new(tensor), rows, columns })
    }

    fn view<T: Float>(&self) -> Result<MatrixView<'_, T>> {
        Ok(MatrixView::contiguous(self.slice.as_slice()?, self.rows, self.columns))
    }
}
