//! Gradients that are scaled down to a largest norm, as in PyTorch's `clip_grad_norm_`.

use candle_core::{DType, Device, Result, Tensor};

/// What PyTorch adds to a norm, so that gradients of zeros can be divided by it.
const EPSILON: f64 = 1e-6;

/// The sum of the squares of a tensor's items, in double precision on the processor.
pub(crate) fn squares(tensor: &Tensor) -> Result<f64> {
    let items = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    items.sqr()?.sum_all()?.to_scalar()
}

/// The factor by which gradients of a norm are scaled so that it is at most `max_norm`.
pub(crate) fn factor(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + EPSILON)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6, "{found} for {expected}");
    }

    #[test]
    fn squares_of_halves_and_of_large_numbers_are_exact() {
        let ones = Tensor::ones(65_536, DType::BF16, &Device::Cpu).unwrap();
        assert_close(squares(&ones).unwrap(), 65_536.0);
        let large = Tensor::new(&[[1e20_f32], [1e20]], &Device::Cpu).unwrap();
        assert!((squares(&large).unwrap() / 2e40 - 1.0).abs() < 1e-6);
        let none = Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
        assert_close(squares(&none).unwrap(), 0.0);
    }

    #[test]
    fn gradients_are_scaled_down_and_never_up() {
        assert_close(factor(8.0, 2.0), 0.25);
        assert_close(factor(1.0, 2.0), 1.0);
        assert_close(factor(0.0, 2.0), 1.0);
    }
}
