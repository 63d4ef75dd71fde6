//! Adding up tensors on their device, in the order of the ranks: what [`whole`](super::whole) does
//! on a processor, to the bit.

use candle_core::{DType, Result, Tensor, bail};

use crate::{device::to_device::copied, reduce::Reduction};

/// The reduction of tensors of one shape, by candle's elementwise operations.
///
/// Halves are added up in single precision and rounded once; integers wrap.
pub(crate) fn reduced(summands: &[Tensor], reduction: Reduction) -> Result<Tensor> {
    let [first, rest @ ..] = summands else { bail!("nothing to reduce") };
    if first.elem_count() == 0 {
        return copied(first);
    }
    let sum = rest
        .iter()
        .try_fold(widened(first)?, |sum, next| combined(&sum, &widened(next)?, reduction))?;
    let result = if reduction == Reduction::Mean { divided(&sum, summands.len())? } else { sum };
    result.to_dtype(first.dtype())
}

fn widened(x: &Tensor) -> Result<Tensor> {
    if matches!(x.dtype(), DType::BF16 | DType::F16) {
        x.to_dtype(DType::F32)
    } else {
        Ok(x.clone())
    }
}

fn combined(sum: &Tensor, next: &Tensor, reduction: Reduction) -> Result<Tensor> {
    match reduction {
        Reduction::Sum | Reduction::Mean => sum + next,
        Reduction::Max => chosen(sum, next, &next.gt(sum)?),
        Reduction::Min => chosen(sum, next, &next.lt(sum)?),
    }
}

/// `next` where it is `better` or not a number, else `sum`.
///
/// candle's own maximum loses a NaN on CUDA devices, and takes one zero for the other.
fn chosen(sum: &Tensor, next: &Tensor, better: &Tensor) -> Result<Tensor> {
    // At most one of the two is 1.
    (better + next.ne(next)?)?.where_cond(next, sum)
}

/// A division: candle's by a number is a product with its inverse, which is rounded twice.
fn divided(sum: &Tensor, count: usize) -> Result<Tensor> {
    if !sum.dtype().is_float() {
        return Ok(sum.clone());
    }
    sum.broadcast_div(&Tensor::new(count as f64, sum.device())?.to_dtype(sum.dtype())?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::{reduce::whole, spec::join::same};

    const ALL: [Reduction; 4] = [Reduction::Sum, Reduction::Mean, Reduction::Max, Reduction::Min];

    fn check(summands: &[Tensor]) {
        for reduction in ALL {
            let result = reduced(summands, reduction).unwrap();
            let expected = whole(summands, reduction).unwrap();
            assert!(
                same(&result, &expected).unwrap(),
                "{reduction:?} of {:?}",
                summands[0].dtype()
            );
        }
    }

    #[test]
    fn every_type_is_reduced_as_by_the_kernel_for_processors() {
        let values = |n: usize| {
            (0..97).map(move |i| ((i * 7919 + n * 104_729) % 2003) as f32 * 0.037 - 30.0)
        };
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let of =
                |n| Tensor::from_iter(values(n), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            check(&[of(0)]);
            check(&[of(0), of(1), of(2)]);
        }
        for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64] {
            let of = |n| {
                Tensor::from_iter(values(n).map(f32::abs), &Device::Cpu)
                    .unwrap()
                    .to_dtype(dtype)
                    .unwrap()
            };
            check(&[of(0), of(1), of(2)]);
        }
    }

    #[test]
    fn what_is_not_a_number_stays_and_zeros_keep_their_signs() {
        let special = [f32::NAN, 0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 1.0];
        let pairs = special.iter().flat_map(|a| special.iter().map(move |b| (*a, *b)));
        let (left, right): (Vec<f32>, Vec<f32>) = pairs.unzip();
        let of = |values: Vec<f32>| Tensor::new(values, &Device::Cpu).unwrap();
        check(&[of(left), of(right)]);
    }

    #[test]
    fn an_empty_tensor_stays_empty() {
        let empty = Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
        check(&[empty.clone(), empty.clone()]);
        let behind_the_end = empty.narrow(1, 1, 2).unwrap();
        let reduced = reduced(&[behind_the_end.clone(), behind_the_end], Reduction::Sum).unwrap();
        assert_eq!(reduced.flatten_all().unwrap().dims(), [0]);
    }
}
