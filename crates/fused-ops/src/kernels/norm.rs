//! Root-mean-square and layer normalization of rows, with their gradients.
//!
//! The forward pass stores nothing for the backward pass, which recomputes the mean and the scale
//! of a row, since it reads the row anyway.

use pulp::NullaryFnOnce;

use super::{
    float::Float,
    lanes::{sum1, sum2, sum3},
    memory::{FillBlock, vec_of_blocks},
    parallel::{ELEMENTS_PER_BLOCK, block_of, rows_per_block},
    vectorized,
};

/// The normalization of a row before weight and bias.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Norm {
    /// Divided by the root of its mean square.
    Rms,
    /// Its mean subtracted, then divided by its standard deviation.
    Layer,
}

/// Returns x + y.
pub(crate) fn add<T: Float>(x: &[T], y: &[T]) -> Vec<T> {
    vec_of_blocks(x.len(), ELEMENTS_PER_BLOCK, |block, out: &mut FillBlock<'_, T>| {
        let x = block_of(x, block, ELEMENTS_PER_BLOCK);
        let y = block_of(y, block, ELEMENTS_PER_BLOCK);
        vectorized(AddRows { x, y, out });
    })
    .0
}

struct AddRows<'a, 'b, T> {
    x: &'a [T],
    y: &'a [T],
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float> NullaryFnOnce for AddRows<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.out.push2(self.x, self.y, |x, y| x + y);
    }
}

/// Returns normalized(x)·weight + bias for each row x.
pub(crate) fn forward<T: Float>(
    norm: Norm,
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    epsilon: T,
) -> Vec<T> {
    let block_len = rows_per_block(weight.len()) * weight.len();
    vec_of_blocks(x.len(), block_len, |block, out| {
        let x = block_of(x, block, block_len);
        vectorized(ForwardKernel { norm, x, weight, bias, epsilon, out });
    })
    .0
}

struct ForwardKernel<'a, 'b, T> {
    norm: Norm,
    x: &'a [T],
    weight: &'a [T],
    bias: Option<&'a [T]>,
    epsilon: T,
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float> NullaryFnOnce for ForwardKernel<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for x in self.x.chunks_exact(self.weight.len()) {
            let (mean, scale) = statistics(self.norm, x, self.epsilon);
            match self.bias {
                None => self.out.push2(x, self.weight, |x, w| (x - mean) * scale * w),
                Some(bias) => {
                    self.out.push3(x, self.weight, bias, |x, w, b| (x - mean) * scale * w + b)
                }
            };
        }
    }
}

/// Returns the mean to subtract from a row, and the scale to multiply it with.
#[inline(always)]
fn statistics<T: Float>(norm: Norm, x: &[T], epsilon: T) -> (T, T) {
    let n = T::round_from_f64(x.len() as f64);
    let mean = match norm {
        Norm::Rms => T::ZERO,
        Norm::Layer => sum1(x, |x| x) / n,
    };
    let square = sum1(x, |x| (x - mean) * (x - mean)) / n;
    (mean, T::ONE / (square + epsilon).sqrt())
}

/// The gradients of the rows, the weight and the bias.
pub(crate) struct Gradients<T> {
    pub(crate) x: Vec<T>,
    pub(crate) weight: Vec<T>,
    /// Zeros for [`Norm::Rms`].
    pub(crate) bias: Vec<T>,
}

/// Returns the gradients of the inputs for the gradient `grad` of the result. `other_grad`, if any,
/// is added to the gradient of x.
pub(crate) fn backward<T: Float>(
    norm: Norm,
    x: &[T],
    weight: &[T],
    grad: &[T],
    other_grad: Option<&[T]>,
    epsilon: T,
) -> Gradients<T> {
    let block_len = rows_per_block(weight.len()) * weight.len();
    let (dx, parts) = vec_of_blocks(x.len(), block_len, |block, out| {
        let x = block_of(x, block, block_len);
        let grad = block_of(grad, block, block_len);
        let other_grad = other_grad.map(|other_grad| block_of(other_grad, block, block_len));
        vectorized(BackwardKernel { norm, x, weight, grad, other_grad, epsilon, out })
    });
    let mut sum = GradientPart::new(weight.len());
    for part in parts {
        vectorized(AddTo { sum: &mut sum.weight, part: &part.weight });
        vectorized(AddTo { sum: &mut sum.bias, part: &part.bias });
    }
    Gradients { x: dx, weight: sum.weight, bias: sum.bias }
}

/// The contribution of a block of rows to the gradients of weight and bias.
struct GradientPart<T> {
    weight: Vec<T>,
    bias: Vec<T>,
}

impl<T: Float> GradientPart<T> {
    fn new(len: usize) -> Self {
        Self { weight: vec![T::ZERO; len], bias: vec![T::ZERO; len] }
    }
}

struct BackwardKernel<'a, 'b, T> {
    norm: Norm,
    x: &'a [T],
    weight: &'a [T],
    grad: &'a [T],
    other_grad: Option<&'a [T]>,
    epsilon: T,
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float> NullaryFnOnce for BackwardKernel<'_, '_, T> {
    type Output = GradientPart<T>;

    #[inline(always)]
    fn call(self) -> GradientPart<T> {
        let Self { norm, weight, other_grad, epsilon, out, .. } = self;
        let width = weight.len();
        let n = T::round_from_f64(width as f64);
        let mut part = GradientPart::new(width);
        let rows = self.x.chunks_exact(width).zip(self.grad.chunks_exact(width));
        for (row, (x, grad)) in rows.enumerate() {
            let (mean, scale) = statistics(norm, x, epsilon);
            // With y = (x − mean) · scale: dx = scale · (g·w − mean of g·w − y · mean of g·w·y).
            let mean_gwy = sum3(grad, weight, x, |g, w, x| g * w * (x - mean)) * scale / n;
            let mean_gw = match norm {
                Norm::Rms => T::ZERO,
                Norm::Layer => sum2(grad, weight, |g, w| g * w) / n,
            };
            let dx = |g: T, w: T, x: T| (g * w - mean_gw - (x - mean) * scale * mean_gwy) * scale;
            match other_grad {
                None => out.push3(grad, weight, x, dx),
                Some(other_grad) => {
                    let other_grad = &other_grad[row * width..][..width];
                    out.push4(grad, weight, x, other_grad, |g, w, x, other_grad| {
                        dx(g, w, x) + other_grad
                    })
                }
            };
            for ((sum, &g), &x) in part.weight.iter_mut().zip(grad).zip(x) {
                *sum += g * ((x - mean) * scale);
            }
            if let Norm::Layer = norm {
                add_to(&mut part.bias, grad);
            }
        }
        part
    }
}

/// Adds one row to another.
struct AddTo<'a, T> {
    sum: &'a mut [T],
    part: &'a [T],
}

impl<T: Float> NullaryFnOnce for AddTo<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        add_to(self.sum, self.part);
    }
}

#[inline(always)]
fn add_to<T: Float>(sum: &mut [T], part: &[T]) {
    for (sum, &part) in sum.iter_mut().zip(part) {
        *sum += part;
    }
}
