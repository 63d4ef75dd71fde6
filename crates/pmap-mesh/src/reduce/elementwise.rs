//! Reduction of tensors on their device, in rank order. The results have the same bits as those of
//! [`reduce_tensors`](super::reduce_tensors) on the CPU.

use candle_core::{DType, Result, Tensor, bail};

use crate::{device::to_device::contiguous_copy, reduce::Reduction};

/// Reduces tensors of one shape by candle's elementwise operations.
///
/// Halves are summed in single precision and rounded once; integers wrap.
pub(crate) fn reduce(summands: &[Tensor], reduction: Reduction) -> Result<Tensor> {
    let [first, rest @ ..] = summands else { bail!("nothing to reduce") };
    if first.elem_count() == 0 {
        return contiguous_copy(first);
    }
    let mut result = widen(first)?;
    for next in rest {
        result = combine(&result, &widen(next)?, reduction)?;
    }
    if reduction == Reduction::Mean {
        result = divide(&result, summands.len())?;
    }
    result.to_dtype(first.dtype())
}

/// Converts halves to single precision.
fn widen(x: &Tensor) -> Result<Tensor> {
    if matches!(x.dtype(), DType::BF16 | DType::F16) {
        x.to_dtype(DType::F32)
    } else {
        Ok(x.clone())
    }
}

fn combine(sum: &Tensor, next: &Tensor, reduction: Reduction) -> Result<Tensor> {
    match reduction {
        Reduction::Sum | Reduction::Mean => sum + next,
        Reduction::Max => select(sum, next, &next.gt(sum)?),
        Reduction::Min => select(sum, next, &next.lt(sum)?),
    }
}

/// Selects `next` where it is `better` or NaN, otherwise `sum`.
///
/// candle's maximum drops NaN on CUDA devices and does not distinguish the signs of zeros.
fn select(sum: &Tensor, next: &Tensor, better: &Tensor) -> Result<Tensor> {
    // At most one of the two conditions is 1.
    (better + next.ne(next)?)?.where_cond(next, sum)
}

/// Divides by the number of summands, as a tensor: candle's division by a number multiplies by the
/// inverse, which rounds twice.
fn divide(sum: &Tensor, count: usize) -> Result<Tensor> {
    if !sum.dtype().is_float() {
        return Ok(sum.clone());
    }
    sum.broadcast_div(&Tensor::new(count as f64, sum.device())?.to_dtype(sum.dtype())?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::{reduce::reduce_tensors, spec::join::bits_equal};

    const ALL: [Reduction; 4] = [Reduction::Sum, Reduction::Mean, Reduction::Max, Reduction::Min];

    fn check(summands: &[Tensor]) {
        for reduction in ALL {
            let result = reduce(summands, reduction).unwrap();
            let expected = reduce_tensors(summands, reduction).unwrap();
            assert!(
                bits_equal(&result, &expected).unwrap(),
                "{reduction:?} of {:?}",
                summands[0].dtype()
            );
        }
    }

    #[test]
    fn every_dtype_matches_the_host_kernel() {
        let values = |n: usize| {
            (0..97).map(move |i| ((i * 7919 + n * 104_729) % 2003) as f32 * 0.037 - 30.0)
        };
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let tensor =
                |n| Tensor::from_iter(values(n), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            check(&[tensor(0)]);
            check(&[tensor(0), tensor(1), tensor(2)]);
        }
        for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64] {
            let tensor = |n| {
                Tensor::from_iter(values(n).map(f32::abs), &Device::Cpu)
                    .unwrap()
                    .to_dtype(dtype)
                    .unwrap()
            };
            check(&[tensor(0), tensor(1), tensor(2)]);
        }
    }

    #[test]
    fn nan_and_signed_zeros_match_the_host_kernel() {
        let special = [f32::NAN, 0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 1.0];
        let pairs = special.iter().flat_map(|a| special.iter().map(move |b| (*a, *b)));
        let (left, right): (Vec<f32>, Vec<f32>) = pairs.unzip();
        let tensor = |values: Vec<f32>| Tensor::new(values, &Device::Cpu).unwrap();
        check(&[tensor(left), tensor(right)]);
    }

    #[test]
    fn empty_tensor_stays_empty() {
        let empty = Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
        check(&[empty.clone(), empty.clone()]);
        let past_the_end = empty.narrow(1, 1, 2).unwrap();
        let reduced = reduce(&[past_the_end.clone(), past_the_end], Reduction::Sum).unwrap();
        assert_eq!(reduced.flatten_all().unwrap().dims(), [0]);
    }
}
