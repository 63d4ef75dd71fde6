//! How fast a loss changes along a direction: as its differences say, and as its gradients do.
//!
//! The direction is cut into cells around the variables. Over each of them the difference of the
//! loss is the integral of the gradient, for which the gradient in the middle stands. So what is
//! compared has no error of first order, at any step size, and a kink of the loss is off in the one
//! cell that it lies in, to either side. A gradient that is wrong is off in all cells alike. How
//! much the cells scatter says how sure their mean is.
//!
//! Differences of the loss alone, however extrapolated, do not get there: in a network with ReLU
//! thousands of kinks lie within any step that rounding allows. Of a transformer in double
//! precision, two neighboring step sizes agreed to 1 % on a derivative that was twice the gradient;
//! the mean over 17 cells was off by 1.5 ± 8 %.

use candle_core::{DType, Tensor};

use super::{CHECKING, Checked, Part};
use crate::{
    error::{Doing, Result},
    gradient_report::Verdict,
};

/// How wide cells are, in units of the direction, at the least: narrow ones have few kinks, and
/// even in these single precision leaves a loss four digits of its change.
const WIDTH: f64 = 1.0 / 256.0;

/// How many cells there are at most on either side of the middle one. Of so many, the scatter is
/// known to a sixth.
const SIDES: usize = 8;

/// By how much a gradient may be off: rounding leaves less than a hundredth of this in single
/// precision, an operation without backward mostly far more.
const TOLERANCE: f64 = 0.02;

/// How much of its rounding a gradient adds up, of each of its items: what is tolerated in half
/// precision besides.
const ROUNDED: f64 = 8.0;

/// By how many times its standard error a mean over all cells must be off to be wrong: one in ten
/// thousand is by chance (Student's t of 16 degrees of freedom), of errors with long tails fewer.
const SURE: f64 = 5.0;

/// Roundings that a loss is taken to have, besides those that its scatter shows.
const ROUNDINGS: f64 = 2.0;

/// A derivative along a direction. By default nothing is moved, and nothing changes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Derivative {
    /// By differences.
    pub(super) expected: f64,
    /// By the gradient.
    pub(super) found: f64,
    /// The standard error of `expected`.
    scatter: f64,
    /// How far `expected` may be off by the rounding of the loss.
    rounding: f64,
    /// How large one is that has the gradient's items with random signs: what a sum in which they
    /// happen to cancel is compared with.
    typical: f64,
    /// By what part of its size it may be off.
    tolerance: f64,
    /// Whether there are as many cells as there can be: that a gradient is wrong is believed only
    /// then.
    is_final: bool,
}

impl Derivative {
    pub(super) fn verdict(&self) -> Verdict {
        let off = (self.expected - self.found).abs();
        let tolerated = self.tolerance * self.size();
        if self.expected.is_finite() && !self.found.is_finite() {
            Verdict::Wrong
        } else if off == 0.0 && self.scatter == 0.0 {
            // Of what the loss does not depend on, too.
            Verdict::Right
        } else if off + self.uncertainty() <= tolerated {
            Verdict::Right
        } else if self.is_final && off > tolerated + SURE * self.scatter + self.rounding {
            Verdict::Wrong
        } else {
            Verdict::Unclear
        }
    }

    /// How far `expected` may be off: in one case of twenty it is by more.
    pub(super) fn uncertainty(&self) -> f64 {
        2.0 * self.scatter + self.rounding
    }

    fn size(&self) -> f64 {
        self.expected.abs().max(self.found.abs()).max(self.typical)
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

/// Where two cells meet.
#[derive(Debug)]
struct Edge {
    values: Vec<Tensor>,
    loss: f64,
}

/// How fast the loss changes over one cell.
#[derive(Clone, Copy, Debug)]
struct Slope {
    expected: f64,
    found: f64,
}

impl Slope {
    fn off(&self) -> f64 {
        self.expected - self.found
    }

    fn is_finite(&self) -> bool {
        self.off().is_finite()
    }
}

/// What is known of a direction.
struct Cells<'a> {
    part: &'a Part<'a>,
    direction: &'a [Tensor],
    width: f64,
    /// The largest loss on an edge.
    loss: f64,
    slopes: Vec<Slope>,
}

impl Part<'_> {
    /// The derivative along a direction, of as many cells as it takes. The variables are left where
    /// the last evaluation was.
    #[track_caller]
    pub(super) fn derivative(
        &self,
        model: &mut impl Checked,
        direction: &[Tensor],
    ) -> Result<Derivative> {
        let width = WIDTH.max(4.0 * self.epsilon());
        let mut cells = Cells { part: self, direction, width, loss: 0.0, slopes: Vec::new() };
        let mut ends = [cells.edge(model, -0.5)?, cells.edge(model, 0.5)?];
        let middle = cells.slope([&ends[0], &ends[1]], 1.0, &self.gradients)?;
        cells.slopes.push(middle);
        for n in 1..=SIDES {
            for (end, side) in ends.iter_mut().zip([-1.0, 1.0]) {
                let place = side * n as f64;
                let gradients = cells.gradients(model, place)?;
                let next = cells.edge(model, place + 0.5 * side)?;
                let slope = cells.slope([end, &next], side, &gradients)?;
                cells.slopes.push(slope);
                *end = next;
            }
            let derivative = cells.derivative(n == SIDES)?;
            if derivative.verdict() != Verdict::Unclear {
                return Ok(derivative);
            }
        }
        cells.derivative(true)
    }

    /// The values at a place along the direction, as the loss computes with them.
    fn moved(&self, direction: &[Tensor], place: f64) -> candle_core::Result<Vec<Tensor>> {
        let values = self.at.iter().zip(direction).zip(&self.dtypes);
        let moved = values.map(|((at, direction), &dtype)| {
            (at.to_dtype(DType::F64)? + (direction * place)?)?.to_dtype(dtype)
        });
        moved.collect()
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
        let epsilon = |dtype: &DType| match dtype {
            DType::F64 => f64::EPSILON,
            DType::F32 => f32::EPSILON.into(),
            DType::F16 => half::f16::EPSILON.to_f64(),
            _ => half::bf16::EPSILON.to_f64(),
        };
        self.dtypes.iter().map(epsilon).fold(0.0, f64::max)
    }
}

/// Places are counted in cells from the variables' own values, which are in the middle of one.
impl Cells<'_> {
    #[track_caller]
    fn edge(&mut self, model: &mut impl Checked, place: f64) -> Result<Edge> {
        let values = self.part.moved(self.direction, place * self.width).doing(CHECKING)?;
        self.part.set(model, &values)?;
        let loss = model.loss()?;
        self.loss = self.loss.max(loss.abs());
        Ok(Edge { values, loss })
    }

    #[track_caller]
    fn gradients(&self, model: &mut impl Checked, place: f64) -> Result<Vec<Tensor>> {
        let values = self.part.moved(self.direction, place * self.width).doing(CHECKING)?;
        self.part.set(model, &values)?;
        self.part.on_host(&model.gradients()?)
    }

    /// The slope from one edge to another, which lies on this side of it, by the gradients between
    /// them.
    fn slope(&self, [from, to]: [&Edge; 2], side: f64, gradients: &[Tensor]) -> Result<Slope> {
        let change = predicted(&from.values, &to.values, gradients).doing(CHECKING)?;
        let width = side * self.width;
        Ok(Slope { expected: (to.loss - from.loss) / width, found: change / width })
    }

    /// What the cells say together.
    fn derivative(&self, is_final: bool) -> Result<Derivative> {
        let typical = self.part.typical(self.direction).doing(CHECKING)?;
        let epsilon = self.part.epsilon();
        let tolerance = TOLERANCE + ROUNDED * epsilon;
        // What is not finite at the variables themselves is not what training can use.
        let middle = self.slopes[0];
        if middle.expected.is_finite() && !middle.found.is_finite() {
            let Slope { expected, found } = middle;
            return Ok(Derivative { expected, found, ..Derivative::default() });
        }
        // Beside them, a loss may have no value.
        let slopes: Vec<&Slope> = self.slopes.iter().filter(|slope| slope.is_finite()).collect();
        let n = slopes.len() as f64;
        let mean = |of: fn(&Slope) -> f64| slopes.iter().map(|slope| of(slope)).sum::<f64>() / n;
        let off = mean(Slope::off);
        let squares: f64 = slopes.iter().map(|slope| (slope.off() - off).powi(2)).sum();
        Ok(Derivative {
            expected: mean(|slope| slope.expected),
            found: mean(|slope| slope.found),
            scatter: (squares / (n - 1.0) / n).sqrt(),
            rounding: ROUNDINGS * epsilon * self.loss / (n * self.width),
            typical,
            tolerance,
            is_final,
        })
    }
}

/// The change of the loss as the gradients say: between the values that there are after rounding,
/// which in half precision are rather other ones.
fn predicted(from: &[Tensor], to: &[Tensor], gradients: &[Tensor]) -> candle_core::Result<f64> {
    let mut change = 0.0;
    for ((from, to), gradient) in from.iter().zip(to).zip(gradients) {
        let moved = (to.to_dtype(DType::F64)? - from.to_dtype(DType::F64)?)?;
        change += (moved * gradient)?.sum_all()?.to_scalar::<f64>()?;
    }
    Ok(change)
}
