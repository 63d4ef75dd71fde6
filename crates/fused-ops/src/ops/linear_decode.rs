//! Linear layers of a few rows without gradients, for text that is generated token by token.

use candle_core::{Device, Shape, Tensor};

use crate::{
    affine::{AffineLayer, n_rows},
    autograd::CpuSlice,
    error::{Error, Result},
    kernels::{
        float::Float,
        linear::{add_bias, matvec},
    },
    ops::linear::linear,
    route::{Route, last_dim},
};

const OP: &str = "linear_decode";

/// Returns x·weightᵀ + bias for each layer, a weight with an optional bias, without gradients.
///
/// The result of [`linear`](crate::linear()) within rounding, but for a few rows at the speed of
/// memory: a product reads each weight once, where `linear` copies blocks of it. From about 16 rows
/// on, `linear` is faster.
///
/// # Shapes
///
/// `x` [.., inputs], each weight [outputs, inputs], its bias \[outputs\]; a result is [.., outputs].
///
/// # Determinism
///
/// The same bits on every processor, for any number of threads, and for a row alone or among other
/// rows. In half precision and on other devices, the bits of [`linear`](crate::linear()).
///
/// # Errors
///
/// [`Gradient`](Error::Gradient) if an input depends on a variable, and the errors of
/// [`linear`](crate::linear()).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fused_ops::linear_decode;
///
/// let x = Tensor::new(&[[1.0_f32, 2.0]], &Device::Cpu)?;
/// let gate = Tensor::new(&[[3.0_f32, 4.0], [-5.0, 1.0]], &Device::Cpu)?;
/// let up = Tensor::new(&[[1.0_f32, 1.0]], &Device::Cpu)?;
/// let bias = Tensor::new(&[0.5_f32], &Device::Cpu)?;
/// let y = linear_decode(&x, &[(&gate, None), (&up, Some(&bias))])?;
/// assert_eq!(y[0].to_vec2::<f32>()?, [[11.0, -3.0]]);
/// assert_eq!(y[1].to_vec2::<f32>()?, [[3.5]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn linear_decode(x: &Tensor, layers: &[(&Tensor, Option<&Tensor>)]) -> Result<Vec<Tensor>> {
    let inputs = last_dim(OP, "x", x)?;
    let mut all = vec![("x", x)];
    for &(weight, bias) in layers {
        AffineLayer::new(weight, bias).check(OP, ["weight", "bias"], x, inputs)?;
        all.push(("weight", weight));
        all.extend(bias.map(|bias| ("bias", bias)));
    }
    if let Some(&(input, _)) = all.iter().find(|(_, tensor)| tensor.track_op()) {
        return Err(Error::gradient(OP, input));
    }
    match Route::new(OP, &all)? {
        Route::F32 => multiply::<f32>(x, layers),
        Route::F64 => multiply::<f64>(x, layers),
        Route::Half(_) | Route::Composed => {
            layers.iter().map(|&(weight, bias)| linear(x, weight, bias, None)).collect()
        }
    }
}

fn multiply<T: Float>(x: &Tensor, layers: &[(&Tensor, Option<&Tensor>)]) -> Result<Vec<Tensor>> {
    let x = x.contiguous()?;
    let weights: Vec<_> =
        layers.iter().map(|(weight, _)| weight.contiguous()).collect::<Result<_, _>>()?;
    let slices: Vec<_> = weights.iter().map(CpuSlice::new).collect();
    let mut matrices: Vec<(&[T], usize)> = Vec::with_capacity(layers.len());
    for (slice, weight) in slices.iter().zip(&weights) {
        matrices.push((slice.as_slice()?, weight.dims()[0]));
    }
    let products = matvec::products(CpuSlice::new(&x).as_slice()?, n_rows(&x), &matrices);
    let results = products.into_iter().zip(layers);
    results.map(|(product, layer)| finish::<T>(&x, product, *layer)).collect()
}

/// Returns the transposed product, [outputs, rows of x], plus the bias.
fn finish<T: Float>(
    x: &Tensor,
    product: Vec<T>,
    (weight, bias): (&Tensor, Option<&Tensor>),
) -> Result<Tensor> {
    let outputs = weight.dims()[0];
    let mut rows = transpose(product, n_rows(x));
    if let Some(bias) = bias {
        add_bias(&mut rows, CpuSlice::new(&bias.contiguous()?).as_slice()?);
    }
    let shape = Shape::from([&x.dims()[..x.rank() - 1], &[outputs]].concat());
    Ok(Tensor::from_vec(rows, shape, &Device::Cpu)?)
}

/// Transposes rows of `columns` elements.
fn transpose<T: Float>(x: Vec<T>, columns: usize) -> Vec<T> {
    if columns == 1 {
        return x;
    }
    (0..columns).flat_map(|column| x.iter().skip(column).step_by(columns).copied()).collect()
}
