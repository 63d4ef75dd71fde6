//! Activations, element by element, with their slopes.

use pulp::NullaryFnOnce;

use super::{
    float::Float,
    memory::{FillBlock, vec_of_blocks},
    parallel::{ELEMENTS_PER_BLOCK, block_of, map_chunks},
    vectorized,
};
use crate::config::Activation;

/// A function of one number.
pub(super) trait ActivationCurve<T: Float>: Copy + Send + Sync {
    fn value(self, x: T) -> T;
    fn slope(self, x: T) -> T;
}

#[derive(Clone, Copy)]
struct Relu;

impl<T: Float> ActivationCurve<T> for Relu {
    #[inline(always)]
    fn value(self, x: T) -> T {
        x.at_least(T::ZERO)
    }

    #[inline(always)]
    fn slope(self, x: T) -> T {
        if x > T::ZERO { T::ONE } else { T::ZERO }
    }
}

#[derive(Clone, Copy)]
struct Gelu;

impl Gelu {
    /// Returns the probability that a standard normal number is below `x`, and the density at `x`.
    #[inline(always)]
    fn normal<T: Float>(x: T) -> (T, T) {
        let z = x.abs() * T::round_from_f64(std::f64::consts::FRAC_1_SQRT_2);
        let (tail, bell) = T::half_erfc(z);
        let probability = if x < T::ZERO { tail } else { T::ONE - tail };
        // One over the root of 2π.
        (probability, bell * T::round_from_f64(0.398_942_280_401_432_7))
    }
}

impl<T: Float> ActivationCurve<T> for Gelu {
    #[inline(always)]
    fn value(self, x: T) -> T {
        x * Self::normal(x).0
    }

    #[inline(always)]
    fn slope(self, x: T) -> T {
        let (probability, density) = Self::normal(x);
        probability + x * density
    }
}

#[derive(Clone, Copy)]
struct GeluTanh;

impl GeluTanh {
    /// Returns (1 + tanh u) / 2 for u = √(2/π) · (x + 0.044715 x³), and 1 minus it. The first is
    /// the logistic function of 2u.
    #[inline(always)]
    fn gate<T: Float>(x: T) -> (T, T) {
        logistic(
            x * (T::ONE + T::round_from_f64(0.044_715) * x * x)
                * T::round_from_f64(Self::TWO_ROOT_TWO_OVER_PI),
        )
    }

    const TWO_ROOT_TWO_OVER_PI: f64 = 1.595_769_121_605_730_7;
}

impl<T: Float> ActivationCurve<T> for GeluTanh {
    #[inline(always)]
    fn value(self, x: T) -> T {
        x * Self::gate(x).0
    }

    #[inline(always)]
    fn slope(self, x: T) -> T {
        let (gate, rest) = Self::gate(x);
        let inner = (T::ONE + T::round_from_f64(0.134_145) * x * x)
            * T::round_from_f64(Self::TWO_ROOT_TWO_OVER_PI);
        gate + x * gate * rest * inner
    }
}

#[derive(Clone, Copy)]
struct Silu;

impl<T: Float> ActivationCurve<T> for Silu {
    #[inline(always)]
    fn value(self, x: T) -> T {
        x * logistic(x).0
    }

    #[inline(always)]
    fn slope(self, x: T) -> T {
        let (gate, rest) = logistic(x);
        gate * (T::ONE + x * rest)
    }
}

/// Returns 1 / (1 + e^−x), and 1 minus it, without the rounding error of a subtraction.
#[inline(always)]
fn logistic<T: Float>(x: T) -> (T, T) {
    let small = (-x.abs()).exp();
    let large = T::ONE / (T::ONE + small);
    let small = small * large;
    if x < T::ZERO { (small, large) } else { (large, small) }
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

/// Returns silu(gate) · up.
pub(crate) fn swiglu<T: Float>(gate: &[T], up: &[T]) -> Vec<T> {
    vec_of_blocks(gate.len(), ELEMENTS_PER_BLOCK, |block, out: &mut FillBlock<'_, T>| {
        let gate = block_of(gate, block, ELEMENTS_PER_BLOCK);
        let up = block_of(up, block, ELEMENTS_PER_BLOCK);
        vectorized(GatedKernel { gate, up, out });
    })
    .0
}

/// Returns the gradient of the gate of silu(gate) · up.
pub(crate) fn swiglu_gate_backward<T: Float>(gate: &[T], up: &[T], grad: &[T]) -> Vec<T> {
    let (grads, _) =
        vec_of_blocks(gate.len(), ELEMENTS_PER_BLOCK, |block, out: &mut FillBlock<'_, T>| {
            let gate = block_of(gate, block, ELEMENTS_PER_BLOCK);
            let up = block_of(up, block, ELEMENTS_PER_BLOCK);
            let grad = block_of(grad, block, ELEMENTS_PER_BLOCK);
            vectorized(GateBackward { gate, up, grad, out });
        });
    grads
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
        self.out.push1(self.x, |x| self.curve.value(x));
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
        for x in self.x {
            *x = self.curve.value(*x);
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
        self.out.push2(self.x, self.grad, |x, grad| grad * self.curve.slope(x));
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
        for (grad, &x) in self.grad.iter_mut().zip(self.x) {
            *grad *= self.curve.slope(x);
        }
    }
}

struct GatedKernel<'a, 'b, T> {
    gate: &'a [T],
    up: &'a [T],
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float> NullaryFnOnce for GatedKernel<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.out.push2(self.gate, self.up, |gate, up| Silu.value(gate) * up);
    }
}

struct GateBackward<'a, 'b, T> {
    gate: &'a [T],
    up: &'a [T],
    grad: &'a [T],
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float> NullaryFnOnce for GateBackward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.out
            .push3(self.gate, self.up, self.grad, |gate, up, grad| grad * up * Silu.slope(gate));
    }
}
