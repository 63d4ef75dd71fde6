//! Softmax and its logarithm over rows, with their gradients.

use pulp::NullaryFnOnce;

use super::{
    exponential::exp_in_place,
    float::Float,
    lanes::{max, sum1, sum2},
    memory::{FillBlock, vec_of_blocks},
    parallel::{block_of, rows_per_block},
    vectorized,
};

/// The result: probabilities or their logarithms.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Softmax {
    Plain,
    Log,
}

/// Returns the softmax of rows of `width` elements; `width` is positive unless there are no rows.
pub(crate) fn forward<T: Float>(softmax: Softmax, x: &[T], width: usize) -> Vec<T> {
    let block_len = rows_per_block(width) * width;
    vec_of_blocks(x.len(), block_len, |block, out: &mut FillBlock<'_, T>| {
        let x = block_of(x, block, block_len);
        vectorized(ForwardKernel { softmax, x, width, out });
    })
    .0
}

struct ForwardKernel<'a, 'b, T> {
    softmax: Softmax,
    x: &'a [T],
    width: usize,
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float> NullaryFnOnce for ForwardKernel<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for x in self.x.chunks_exact(self.width) {
            let top = max(x);
            match self.softmax {
                Softmax::Plain => {
                    let y = self.out.push1(x, |x| x - top);
                    exp_in_place(y);
                    let factor = T::ONE / sum1(y, |y| y);
                    for y in y {
                        *y *= factor;
                    }
                }
                Softmax::Log => {
                    let log_sum = sum1(x, |x| (x - top).exp()).ln();
                    self.out.push1(x, |x| (x - top) - log_sum);
                }
            }
        }
    }
}

/// Returns the gradient, from the result `y` and its gradient.
pub(crate) fn backward<T: Float>(softmax: Softmax, y: &[T], grad: &[T], width: usize) -> Vec<T> {
    let block_len = rows_per_block(width) * width;
    vec_of_blocks(y.len(), block_len, |block, out: &mut FillBlock<'_, T>| {
        let y = block_of(y, block, block_len);
        let grad = block_of(grad, block, block_len);
        vectorized(BackwardKernel { softmax, y, grad, width, out });
    })
    .0
}

struct BackwardKernel<'a, 'b, T> {
    softmax: Softmax,
    y: &'a [T],
    grad: &'a [T],
    width: usize,
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float> NullaryFnOnce for BackwardKernel<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let rows = self.y.chunks_exact(self.width).zip(self.grad.chunks_exact(self.width));
        for (y, grad) in rows {
            match self.softmax {
                Softmax::Plain => {
                    let projection = sum2(y, grad, |y, g| y * g);
                    self.out.push2(y, grad, |y, g| y * (g - projection));
                }
                Softmax::Log => {
                    let sum = sum1(grad, |g| g);
                    self.out.push2(y, grad, |y, g| g - y.exp() * sum);
                }
            }
        }
    }
}
