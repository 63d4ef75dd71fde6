//! How fast a loss changes along a direction: as its differences say, and as its gradient does.

use candle_core::{DType, Tensor};

use super::{CHECKING, Checked, Part};
use crate::{
    error::{Doing, Result},
    gradient_report::Verdict,
};

/// The steps to both sides, in units of the direction: from an eighth of the variables' size down
/// to where single precision has half of its digits left. Large ones are off by the curvature of
/// the loss, small ones by its rounding.
const STEPS: [f64; 5] = [0.125, 0.031_25, 0.007_812_5, 0.001_953_125, 0.000_488_281_25];

/// By how much a gradient may be off beside what differences can say: single precision leaves less
/// than a hundredth of this, an operation without backward mostly far more.
const TOLERANCE: f64 = 0.02;

/// From how much on a gradient that is off is wrong. Below it, it is unclear: the kinks of a ReLU
/// network leave its differences off by up to some 7 %, whatever the steps.
const WRONG: f64 = 0.08;

/// Differences that are off by more than this part of the derivative say nothing.
const CLEAR: f64 = 0.2;

/// Roundings that a loss is taken to have in its last digit.
const ROUNDINGS: f64 = 16.0;

/// A derivative along a direction. By default nothing is moved, and nothing changes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Derivative {
    /// By differences.
    pub(super) expected: f64,
    /// By the gradient.
    pub(super) found: f64,
    /// How far `expected` may be off.
    pub(super) uncertainty: f64,
    /// How large one is that has the gradient's items with random signs: what a sum in which they
    /// happen to cancel is compared with.
    typical: f64,
}

impl Derivative {
    pub(super) fn verdict(&self) -> Verdict {
        let off = (self.expected - self.found).abs();
        let tolerated = TOLERANCE * self.size();
        if self.expected.is_finite() && !self.found.is_finite() {
            Verdict::Wrong
        } else if off == 0.0 {
            // Of what the loss does not depend on, too.
            Verdict::Right
        } else if off > (tolerated + 3.0 * self.uncertainty).max(WRONG * self.size()) {
            Verdict::Wrong
        } else if off <= tolerated + self.uncertainty && self.uncertainty <= CLEAR * self.size() {
            Verdict::Right
        } else {
            Verdict::Unclear
        }
    }

    fn size(&self) -> f64 {
        self.expected.abs().max(self.found.abs()).max(self.typical)
    }

    /// Whether smaller steps would say nothing new. That a gradient is wrong is believed only after
    /// all of them: over large ones the kinks of a loss may agree by chance.
    fn is_settled(&self) -> bool {
        self.verdict() == Verdict::Right && self.uncertainty <= 0.1 * TOLERANCE * self.size()
    }

    /// Widens the uncertainty to what smaller steps disagree with, beyond their own rounding.
    ///
    /// Where a loss has many kinks, differences approach the derivative more slowly than those of a
    /// smooth one, and two neighboring steps agree before they are near it.
    fn doubt(&mut self, finer: Self, noise: f64) {
        let apart = (finer.expected - self.expected).abs();
        self.uncertainty = self.uncertainty.max(apart - noise);
    }

    /// The one of two that is less uncertain; one that is no number is the most.
    fn or_clearer(self, other: Self) -> Self {
        if other.uncertainty < self.uncertainty || self.uncertainty.is_nan() { other } else { self }
    }

    /// The one of two that says more against the gradient.
    pub(super) fn or_worse(self, other: Self) -> Self {
        let rank = |derivative: &Self| match derivative.verdict() {
            Verdict::Right => 0,
            Verdict::Unclear => 1,
            Verdict::Wrong => 2,
        };
        let off =
            |derivative: &Self| (derivative.expected - derivative.found).abs() / derivative.size();
        let is_worse = match rank(&other).cmp(&rank(&self)) {
            std::cmp::Ordering::Equal => off(&other) > off(&self) || off(&self).is_nan(),
            order => order.is_gt(),
        };
        if is_worse { other } else { self }
    }
}

/// What two evaluations of a loss say of its derivative.
#[derive(Clone, Copy, Debug)]
struct Difference {
    expected: f64,
    found: f64,
    /// How far `expected` may be off by rounding.
    noise: f64,
}

impl Part<'_> {
    /// The derivative along a direction, from the two neighboring steps that agree best. The
    /// variables are left where the last step was.
    #[track_caller]
    pub(super) fn derivative(
        &self,
        model: &mut impl Checked,
        direction: &[Tensor],
    ) -> Result<Derivative> {
        let typical = self.typical(direction).doing(CHECKING)?;
        let mut derivatives: Vec<Derivative> = Vec::new();
        let mut coarse: Option<Difference> = None;
        for step in STEPS {
            let fine = self.difference(model, direction, step)?;
            if let Some(coarse) = coarse {
                let derivative = extrapolated(coarse, fine, typical);
                for coarser in &mut derivatives {
                    coarser.doubt(derivative, fine.noise);
                }
                derivatives.push(derivative);
                if derivative.is_settled() {
                    break;
                }
            }
            coarse = Some(fine);
        }
        #[expect(clippy::expect_used, reason = "there are several steps")]
        Ok(derivatives.into_iter().reduce(Derivative::or_clearer).expect("two steps make one"))
    }

    /// The difference of the loss between a step to one side and to the other.
    #[track_caller]
    fn difference(
        &self,
        model: &mut impl Checked,
        direction: &[Tensor],
        step: f64,
    ) -> Result<Difference> {
        let ahead = self.moved(direction, step).doing(CHECKING)?;
        let behind = self.moved(direction, -step).doing(CHECKING)?;
        self.set(model, &ahead)?;
        let loss_ahead = model.loss()?;
        self.set(model, &behind)?;
        let loss_behind = model.loss()?;
        let rounding = ROUNDINGS * self.epsilon() * loss_ahead.abs().max(loss_behind.abs());
        Ok(Difference {
            expected: (loss_ahead - loss_behind) / (2.0 * step),
            found: self.predicted(&ahead, &behind).doing(CHECKING)? / (2.0 * step),
            noise: rounding / (2.0 * step),
        })
    }

    /// The values after a step, of the variables' own types.
    fn moved(&self, direction: &[Tensor], step: f64) -> candle_core::Result<Vec<Tensor>> {
        let moved = self.at.iter().zip(direction).map(|(at, direction)| {
            (at.to_dtype(DType::F64)? + (direction * step)?)?.to_dtype(at.dtype())
        });
        moved.collect()
    }

    /// The change of the loss as the gradient says: from the values that there are after rounding,
    /// which in half precision are rather other ones.
    fn predicted(&self, ahead: &[Tensor], behind: &[Tensor]) -> candle_core::Result<f64> {
        let mut change = 0.0;
        for ((ahead, behind), gradient) in ahead.iter().zip(behind).zip(&self.gradients) {
            let moved = (ahead.to_dtype(DType::F64)? - behind.to_dtype(DType::F64)?)?;
            change += (moved * gradient)?.sum_all()?.to_scalar::<f64>()?;
        }
        Ok(change)
    }

    fn typical(&self, direction: &[Tensor]) -> candle_core::Result<f64> {
        let mut squares = 0.0;
        for (gradient, direction) in self.gradients.iter().zip(direction) {
            squares += (gradient * direction)?.sqr()?.sum_all()?.to_scalar::<f64>()?;
        }
        Ok(squares.sqrt())
    }

    /// What the coarsest type of the variables, in which the loss is mostly computed, rounds off of
    /// 1.
    fn epsilon(&self) -> f64 {
        let epsilon = |at: &Tensor| match at.dtype() {
            DType::F64 => f64::EPSILON,
            DType::F32 => f32::EPSILON.into(),
            DType::F16 => half::f16::EPSILON.to_f64(),
            _ => half::bf16::EPSILON.to_f64(),
        };
        self.at.iter().map(epsilon).fold(0.0, f64::max)
    }
}

/// The derivative from differences over a step and over a quarter of it, whose errors are as 16 to
/// 1 (Richardson, "The approximate arithmetical solution by finite differences", 1911).
fn extrapolated(coarse: Difference, fine: Difference, typical: f64) -> Derivative {
    let apart = fine.expected - coarse.expected;
    Derivative {
        expected: fine.expected + apart / 15.0,
        found: fine.found,
        // Where the loss is not smooth, it is off by more than a fifteenth.
        uncertainty: apart.abs() / 3.0 + fine.noise,
        typical,
    }
}
