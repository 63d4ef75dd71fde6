//! Gradients that are scaled down to a largest norm, as in PyTorch's `clip_grad_norm_`.

use candle_core::{DType, Device, Result, Tensor};

/// What PyTorch adds to a norm, so that gradients of zeros can be divided by it.
const EPSILON: f64 = 1e-6;

/// The sum of the squares of all items, a scalar on `device`. Each tensor's squares are added up in
/// the tensor's own type, so halves overflow or lose items there; the sums of tensors in double
/// precision.
pub(crate) fn squares(tensors: &[Tensor], device: &Device) -> Result<Tensor> {
    let mut sum = 0.0;
    for tensor in tensors {
        sum += scalar(&tensor.sqr()?.sum_all()?)?;
    }
    Tensor::new(sum, device)
}

/// The factor by which gradients of a norm are scaled so that it is at most `max_norm`.
pub(crate) fn factor(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + EPSILON)).min(1.0)
}

/// A scalar of any type.
pub(crate) fn scalar(tensor: &Tensor) -> Result<f64> {
    tensor.to_dtype(DType::F64)?.to_scalar()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6, "{found} for {expected}");
    }

    #[test]
    fn squares_are_summed_over_all_tensors() {
        let tensors = [
            Tensor::new(&[1_f32, 2.], &Device::Cpu).unwrap(),
            Tensor::new(&[[3_f64], [0.5]], &Device::Cpu).unwrap(),
        ];
        let sum = |tensors| scalar(&squares(tensors, &Device::Cpu).unwrap()).unwrap();
        assert_close(sum(&tensors), 14.25);
        assert_close(sum(&[]), 0.0);
    }

    #[test]
    fn gradients_are_scaled_down_and_never_up() {
        assert_close(factor(8.0, 2.0), 0.25);
        assert_close(factor(1.0, 2.0), 1.0);
        assert_close(factor(0.0, 2.0), 1.0);
    }
}
