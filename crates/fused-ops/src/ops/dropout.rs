//! Dropout from a key instead of a stateful generator.
//!
//! Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014.
//! candle's dropout uses a generator that cannot be seeded on a processor, so a run cannot be
//! repeated.

use candle_core::Tensor;

use crate::{
    autograd::{CpuSlice, record_unary},
    composed,
    config::DropoutKey,
    error::{Error, Result},
    kernels::{
        dropout::{DropSpec, apply},
        float::Float,
    },
    route::route,
};

/// Sets each element to zero with `probability`, and divides the other elements by 1 −
/// `probability`.
///
/// # Shapes
///
/// Any; the result has the shape of `x`.
///
/// # Determinism
///
/// The dropped elements depend only on `key` and the indices, on every device and for any number of
/// threads: the random number of each element comes from Philox 4×32-10 (Salmon et al., 2011). A
/// second pass with the same key drops the same elements, as [`checkpoint`](crate::checkpoint())
/// requires. With its offset in the key, a slice drops the same elements as the full tensor.
///
/// # Errors
///
/// [`OutOfRange`](Error::OutOfRange) if the probability is not in [0, 1), [`DType`](Error::DType) if `x`
/// has no floating type.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fused_ops::{DropoutKey, dropout};
///
/// let x = Tensor::ones(1000, candle_core::DType::F32, &Device::Cpu)?;
/// let key = DropoutKey { seed: 42, call: 0, offset: 0 };
/// let y = dropout(&x, 0.5, key)?.to_vec1::<f32>()?;
/// assert!(y.iter().all(|&y| y == 0.0 || y == 2.0));
/// assert!((450..550).contains(&y.iter().filter(|&&y| y == 0.0).count()));
/// assert_eq!(y, dropout(&x, 0.5, key)?.to_vec1::<f32>()?);
///
/// // The second half alone.
/// let half = dropout(&x.narrow(0, 500, 500)?, 0.5, DropoutKey { offset: 500, ..key })?;
/// assert_eq!(half.to_vec1::<f32>()?, y[500..]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn dropout(x: &Tensor, probability: f64, key: DropoutKey) -> Result<Tensor> {
    let drop = check(probability, key)?;
    route!("dropout", [x], fused(x, drop), composed::dropout(x, drop))
}

fn check(probability: f64, key: DropoutKey) -> Result<DropSpec> {
    if !(0.0..1.0).contains(&probability) {
        let expected = "at least 0 and less than 1";
        return Err(Error::out_of_range("dropout", "probability", &probability, expected));
    }
    Ok(DropSpec::new(probability, key))
}

fn fused<T: Float>(x: &Tensor, drop: DropSpec) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let y = apply::<T>(CpuSlice::new(x).as_slice()?, drop);
    record_unary(x, y, x.shape().clone(), move |_, _, grad| Ok(apply::<T>(grad, drop)))
}
