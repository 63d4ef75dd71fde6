//! Tensors and their elements.

use candle_core::{DType, Device, Result, Tensor};

/// Numbers from −2 to 2 that look random.
pub(crate) fn numbers(shape: &[usize], seed: u64) -> Tensor {
    let numbers =
        (0..shape.iter().product()).map(|i: usize| 2.0 * (i as f64 * 7.3 + seed as f64).sin());
    Tensor::from_iter(numbers, &Device::Cpu).unwrap().reshape(shape).unwrap()
}

/// Returns the elements of a tensor as f64.
pub(crate) fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the largest magnitude. NaN counts as the largest; candle's `max` ignores it.
pub(crate) fn largest(x: &Tensor) -> Result<f32> {
    let elements = x.flatten_all()?.to_vec1::<f32>()?;
    Ok(elements.into_iter().map(f32::abs).max_by(f32::total_cmp).unwrap_or(0.0))
}
