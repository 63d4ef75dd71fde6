//! Activations, element by element, with their slopes.

use pulp::NullaryFnOnce;

use super::{
    exponential::exp_in_place,
    float::Float,
    memory::{FillBlock, two_vecs_of_blocks, vec_of_blocks},
    parallel::{ELEMENTS_PER_BLOCK, block_of, map_chunks},
    vectorized,
};
use crate::config::Activation;

/// Numbers that stay in the first-level cache with their exponentials.
const CHUNK: usize = 512;

/// A function of one number, from the number and an exponential.
pub(super) trait ActivationCurve<T: Float>: Copy + Send + Sync {
    /// Whether the function needs the exponential.
    const HAS_EXPONENTIAL: bool = true;

    /// Returns the number whose exponential the function needs.
    fn exponent(self, x: T) -> T;
    fn value(self, x: T, exponential: T) -> T;
    fn slope(self, x: T, exponential: T) -> T;
}

#[derive(Clone, Copy)]
struct Relu;

impl<T: Float> ActivationCurve<T> for Relu {
    const HAS_EXPONENTIAL: bool = false;

    #[inline(always)]
    fn exponent(self, _: T) -> T {
        unreachable!("ReLU has no exponential")
    }

    #[inline(always)]
    fn value(self, x: T, _: T) -> T {
        x.at_least(T::ZERO)
    }

    #[inline(always)]
    fn slope(self, x: T, _: T) -> T {
        if x > T::ZERO { T::ONE } else { T::ZERO }
    }
}

#[derive(Clone, Copy)]
struct Gelu;

impl Gelu {
    #[inline(always)]
    fn z<T: Float>(x: T) -> T {
        x.abs() * T::round_from_f64(std::f64::consts::FRAC_1_SQRT_2)
    }

    /// Returns the probability that a standard normal number is below `x`.
    #[inline(always)]
    fn probability<T: Float>(x: T, bell: T) -> T {
        let tail = T::half_erfc(Self::z(x), bell);
        if x < T::ZERO { tail } else { T::ONE - tail }
    }
}

impl<T: Float> ActivationCurve<T> for Gelu {
    #[inline(always)]
    fn exponent(self, x: T) -> T {
        T::bell_exponent(Self::z(x))
    }

    #[inline(always)]
    fn value(self, x: T, bell: T) -> T {
        x * Self::probability(x, bell)
    }

    #[inline(always)]
    fn slope(self, x: T, bell: T) -> T {
        // One over the root of 2π.
        let density = bell * T::round_from_f64(0.398_942_280_401_432_7);
        Self::probability(x, bell) + x * density
    }
}

#[derive(Clone, Copy)]
struct GeluTanh;

impl GeluTanh {
    const TWO_ROOT_TWO_OVER_PI: f64 = 1.595_769_121_605_730_7;

    /// Returns 2u for u = √(2/π) · (x + 0.044715 x³). The logistic function of 2u is (1 + tanh u) / 2.
    #[inline(always)]
    fn double_u<T: Float>(x: T) -> T {
        x * (T::ONE + T::round_from_f64(0.044_715) * x * x)
            * T::round_from_f64(Self::TWO_ROOT_TWO_OVER_PI)
    }
}

impl<T: Float> ActivationCurve<T> for GeluTanh {
    #[inline(always)]
    fn exponent(self, x: T) -> T {
        -Self::double_u(x).abs()
    }

    #[inline(always)]
    fn value(self, x: T, exponential: T) -> T {
        x * logistic(x, exponential).0
    }

    #[inline(always)]
    fn slope(self, x: T, exponential: T) -> T {
        let (gate, rest) = logistic(x, exponential);
        let inner = (T::ONE + T::round_from_f64(0.134_145) * x * x)
            * T::round_from_f64(Self::TWO_ROOT_TWO_OVER_PI);
        gate + x * gate * rest * inner
    }
}

#[derive(Clone, Copy)]
struct Silu;

impl<T: Float> ActivationCurve<T> for Silu {
    #[inline(always)]
    fn exponent(self, x: T) -> T {
        -x.abs()
    }

    #[inline(always)]
    fn value(self, x: T, exponential: T) -> T {
        x * logistic(x, exponential).0
    }

    #[inline(always)]
    fn slope(self, x: T, exponential: T) -> T {
        let (gate, rest) = logistic(x, exponential);
        gate * (T::ONE + x * rest)
    }
}

/// Returns 1 / (1 + e^−x), and 1 minus it, without the rounding error of a subtraction, where
/// `exponential` is e^−|x|. Of `x` only the sign counts.
#[inline(always)]
fn logistic<T: Float>(x: T, exponential: T) -> (T, T) {
    let large = T::ONE / (T::ONE + exponential);
    let small = exponential * large;
    if x < T::ZERO { (small, large) } else { (large, small) }
}

/// Writes the exponentials that a curve needs for the numbers `x` to the start of `exponentials`, and
/// returns them.
#[inline(always)]
fn exponentials_of<'a, T: Float, C: ActivationCurve<T>>(
    curve: C,
    x: &[T],
    exponentials: &'a mut [T; CHUNK],
) -> &'a [T] {
    let exponentials = &mut exponentials[..x.len()];
    if C::HAS_EXPONENTIAL {
        exponentials.iter_mut().zip(x).for_each(|(exponent, &x)| *exponent = curve.exponent(x));
        exp_in_place(exponentials);
    }
    exponentials
}

/// Evaluates an expression with the curve of an activation.
macro_rules! with_curve {
    ($activation:expr, |$curve:ident| $body:expr) => {
        match $activation {
            Activation::Relu => {
                let $curve = Relu;
                $body
            }
            Activation::Gelu => {
                let $curve = Gelu;
                $body
            }
            Activation::GeluTanh => {
                let $curve = GeluTanh;
                $body
            }
            Activation::Silu => {
                let $curve = Silu;
                $body
            }
        }
    };
}

/// Returns the activation of each element.
pub(crate) fn forward<T: Float>(activation: Activation, x: &[T]) -> Vec<T> {
    with_curve!(activation, |curve| {
        vec_of_blocks(x.len(), ELEMENTS_PER_BLOCK, |block, out: &mut FillBlock<'_, T>| {
            let x = block_of(x, block, ELEMENTS_PER_BLOCK);
            vectorized(ForwardKernel { curve, x, out });
        })
        .0
    })
}

/// Replaces each element by its activation.
pub(crate) fn forward_in_place<T: Float>(activation: Activation, x: &mut [T]) {
    with_curve!(activation, |curve| {
        map_chunks(x, ELEMENTS_PER_BLOCK, |_, x| vectorized(ForwardInPlace { curve, x }));
    });
}

/// Returns the gradient of each element of `x`, where `grad` is the gradient of its activation.
pub(crate) fn backward<T: Float>(activation: Activation, x: &[T], grad: &[T]) -> Vec<T> {
    with_curve!(activation, |curve| {
        vec_of_blocks(x.len(), ELEMENTS_PER_BLOCK, |block, out: &mut FillBlock<'_, T>| {
            let x = block_of(x, block, ELEMENTS_PER_BLOCK);
            let grad = block_of(grad, block, ELEMENTS_PER_BLOCK);
            vectorized(BackwardKernel { curve, x, grad, out });
        })
        .0
    })
}

/// Replaces the gradient of each activation by the gradient of its element.
pub(crate) fn backward_in_place<T: Float>(activation: Activation, x: &[T], grad: &mut [T]) {
    assert_eq!(x.len(), grad.len());
    with_curve!(activation, |curve| {
        map_chunks(grad, ELEMENTS_PER_BLOCK, |block, grad| {
            let x = block_of(x, block, ELEMENTS_PER_BLOCK);
            vectorized(BackwardInPlace { curve, x, grad });
        });
    });
}

/// Returns activation(gate) · up.
pub(crate) fn gated<T: Float>(activation: Activation, gate: &[T], up: &[T]) -> Vec<T> {
    with_curve!(activation, |curve| {
        vec_of_blocks(gate.len(), ELEMENTS_PER_BLOCK, |block, out: &mut FillBlock<'_, T>| {
            let gate = block_of(gate, block, ELEMENTS_PER_BLOCK);
            let up = block_of(up, block, ELEMENTS_PER_BLOCK);
            vectorized(GatedKernel { curve, gate, up, out });
        })
        .0
    })
}

/// Returns the gradient of the gate of activation(gate) · up, and this product itself. `grad` is the
/// gradient of the product, and is replaced by the gradient of `up`.
pub(crate) fn gated_backward<T: Float>(
    activation: Activation,
    gate: &[T],
    up: &[T],
    grad: &mut [T],
) -> [Vec<T>; 2] {
    with_curve!(activation, |curve| {
        two_vecs_of_blocks(grad, ELEMENTS_PER_BLOCK, |block, grad, [grad_gate, product]| {
            let gate = block_of(gate, block, ELEMENTS_PER_BLOCK);
            let up = block_of(up, block, ELEMENTS_PER_BLOCK);
            vectorized(GatedBackward { curve, gate, up, grad, grad_gate, product });
        })
    })
}

struct ForwardKernel<'a, 'b, T, C> {
    curve: C,
    x: &'a [T],
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float, C: ActivationCurve<T>> NullaryFnOnce for ForwardKernel<'_, '_, T, C> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let mut memory = [T::ZERO; CHUNK];
        for x in self.x.chunks(CHUNK) {
            let exponentials = exponentials_of(self.curve, x, &mut memory);
            self.out.push2(x, exponentials, |x, e| self.curve.value(x, e));
        }
    }
}

struct ForwardInPlace<'a, T, C> {
    curve: C,
    x: &'a mut [T],
}

impl<T: Float, C: ActivationCurve<T>> NullaryFnOnce for ForwardInPlace<'_, T, C> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let mut memory = [T::ZERO; CHUNK];
        for x in self.x.chunks_mut(CHUNK) {
            let exponentials = exponentials_of(self.curve, x, &mut memory);
            for (x, &e) in x.iter_mut().zip(exponentials) {
                *x = self.curve.value(*x, e);
            }
        }
    }
}

struct BackwardKernel<'a, 'b, T, C> {
    curve: C,
    x: &'a [T],
    grad: &'a [T],
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float, C: ActivationCurve<T>> NullaryFnOnce for BackwardKernel<'_, '_, T, C> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let mut memory = [T::ZERO; CHUNK];
        for (x, grad) in self.x.chunks(CHUNK).zip(self.grad.chunks(CHUNK)) {
            let exponentials = exponentials_of(self.curve, x, &mut memory);
            self.out.push3(x, exponentials, grad, |x, e, grad| grad * self.curve.slope(x, e));
        }
    }
}

struct BackwardInPlace<'a, T, C> {
    curve: C,
    x: &'a [T],
    grad: &'a mut [T],
}

impl<T: Float, C: ActivationCurve<T>> NullaryFnOnce for BackwardInPlace<'_, T, C> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let mut memory = [T::ZERO; CHUNK];
        for (x, grad) in self.x.chunks(CHUNK).zip(self.grad.chunks_mut(CHUNK)) {
            let exponentials = exponentials_of(self.curve, x, &mut memory);
            for ((grad, &x), &e) in grad.iter_mut().zip(x).zip(exponentials) {
                *grad *= self.curve.slope(x, e);
            }
        }
    }
}

struct GatedKernel<'a, 'b, T, C> {
    curve: C,
    gate: &'a [T],
    up: &'a [T],
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float, C: ActivationCurve<T>> NullaryFnOnce for GatedKernel<'_, '_, T, C> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let mut memory = [T::ZERO; CHUNK];
        for (gate, up) in self.gate.chunks(CHUNK).zip(self.up.chunks(CHUNK)) {
            let exponentials = exponentials_of(self.curve, gate, &mut memory);
            self.out.push3(gate, exponentials, up, |gate, e, up| self.curve.value(gate, e) * up);
        }
    }
}

struct GatedBackward<'a, 'b, T, C> {
    curve: C,
    gate: &'a [T],
    up: &'a [T],
    grad: &'a mut [T],
    grad_gate: &'a mut FillBlock<'b, T>,
    product: &'a mut FillBlock<'b, T>,
}

impl<T: Float, C: ActivationCurve<T>> NullaryFnOnce for GatedBackward<'_, '_, T, C> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let curve = self.curve;
        let mut memory = [T::ZERO; CHUNK];
        let parts = self.gate.chunks(CHUNK).zip(self.up.chunks(CHUNK));
        for ((gate, up), grad) in parts.zip(self.grad.chunks_mut(CHUNK)) {
            let exponentials = exponentials_of(curve, gate, &mut memory);
            self.product.push3(gate, exponentials, up, |gate, e, up| curve.value(gate, e) * up);
            let out = &mut *self.grad_gate;
            out.push4(gate, exponentials, grad, up, |gate, e, grad, up| {
                grad * up * curve.slope(gate, e)
            });
            for ((grad, &gate), &e) in grad.iter_mut().zip(gate).zip(exponentials) {
                *grad *= curve.value(gate, e);
            }
        }
    }
}
