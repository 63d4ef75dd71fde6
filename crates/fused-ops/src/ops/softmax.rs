//! Softmax and its logarithm.

use candle_core::{Tensor, shape::Dim};

use crate::{
    autograd::{CpuSlice, record_unary},
    composed,
    error::Result,
    kernels::{
        float::Float,
        softmax::{self as kernel, Softmax},
    },
    route::route,
};

/// Divides the exponentials along `dim` by their sum.
///
/// The largest element is subtracted first, so no exponential overflows. The result of a row with a
/// NaN or +∞ is NaN.
///
/// # Shapes
///
/// Any with the dimension `dim`; the result has the shape of `x`. The operation is
/// fastest along the last dimension.
///
/// # Determinism
///
/// The same bits on every processor and for any number of threads. The bits of a row do not depend
/// on the other rows.
///
/// # Errors
///
/// [`DType`](crate::Error::DType) if `x` has no floating type, [`Candle`](crate::Error::Candle) if
/// it has no such dimension.
///
/// # Examples
///
/// ```
/// use candle_core::{D, Device, Var};
///
/// let x = Var::new(&[[0.0_f32, 0.0], [9.0, f32::NEG_INFINITY]], &Device::Cpu)?;
/// let y = fused_ops::softmax(&x, D::Minus1)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[0.5, 0.5], [1.0, 0.0]]);
/// assert!(y.sqr()?.sum_all()?.backward()?.get(&x).is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[expect(clippy::needless_pass_by_value, reason = "a dimension is given as to candle")]
pub fn softmax(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "softmax")?;
    apply_along(x, dim, |x| route!("softmax", [x], fused(x, Softmax::Plain), composed::softmax(x)))
}

/// Returns the logarithm of [`softmax`](crate::softmax()), exact where softmax rounds to 0.
///
/// # Shapes
///
/// Like [`softmax`](crate::softmax()).
///
/// # Determinism
///
/// Like [`softmax`](crate::softmax()), except that the logarithm is the system's and may differ
/// between systems.
///
/// # Errors
///
/// The errors of [`softmax`](crate::softmax()).
///
/// # Examples
///
/// ```
/// use candle_core::{D, Device, Tensor};
///
/// let x = Tensor::new(&[0.0_f64, -1000.0], &Device::Cpu)?;
/// assert_eq!(fused_ops::log_softmax(&x, D::Minus1)?.to_vec1::<f64>()?, [0.0, -1000.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[expect(clippy::needless_pass_by_value, reason = "a dimension is given as to candle")]
pub fn log_softmax(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "log_softmax")?;
    apply_along(x, dim, |x| {
        route!("log_softmax", [x], fused(x, Softmax::Log), composed::log_softmax(x))
    })
}

/// Applies `f`, a function along the last dimension, along `dim`.
fn apply_along(
    x: &Tensor,
    dim: usize,
    f: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let last = x.rank() - 1;
    if dim == last { f(x) } else { Ok(f(&x.transpose(dim, last)?)?.transpose(dim, last)?) }
}

fn row_width(x: &Tensor) -> usize {
    x.dims().last().copied().unwrap_or(1)
}

fn fused<T: Float>(x: &Tensor, softmax: Softmax) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let width = row_width(x);
    let y = kernel::forward::<T>(softmax, CpuSlice::new(x).as_slice()?, width);
    record_unary(x, y, x.shape().clone(), move |_, y, grad| {
        Ok(kernel::backward(softmax, y, grad, width))
    })
}
