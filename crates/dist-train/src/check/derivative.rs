//! Slopes of a loss along a direction, by differences of the loss and by its gradients.
//!
//! The direction is divided into cells around the variables. Over a cell, the difference of the
//! loss is the integral of the gradient, which is approximated by the gradient at the cell's
//! middle. So the comparison has no first-order error for any step size. A kink of the loss
//! disturbs only the cell that contains it, in either direction, but a wrong gradient is off in all
//! cells alike. The scatter of the cells gives the uncertainty of their mean.
//!
//! Differences of the loss alone fail even with extrapolation: in a network with ReLU, any step
//! large enough for rounding contains thousands of kinks. For a transformer in double precision,
//! two neighboring step sizes agreed to 1 % on a derivative twice as large as the gradient; the
//! mean over 17 cells was off by 1.5 ± 8 %.

use candle_core::{DType, Tensor};

use super::{CHECKING, Checked, CheckedPart};
use crate::{
    error::{Doing, Result},
    gradient_report::Verdict,
};

/// The minimum cell width, in units of the direction. Narrow cells contain few kinks, and this
/// width still leaves four digits of a loss difference in single precision.
const WIDTH: f64 = 1.0 / 256.0;

/// The maximum number of cells on either side of the middle cell. With this number, the scatter is
/// known to a sixth.
const SIDES: usize = 8;

/// The tolerated relative error of a gradient. Rounding in single precision causes less than a
/// hundredth of it; an operation without a backward pass mostly causes far more.
const TOLERANCE: f64 = 0.02;

/// The number of roundings a gradient accumulates per item, tolerated in addition because of half
/// precision.
const ROUNDED: f64 = 8.0;

/// The number of standard errors by which the mean of all cells must be off to count as wrong: one
/// in ten thousand is by chance (Student's t with 16 degrees of freedom), fewer for errors with
/// long tails.
const SURE: f64 = 5.0;

/// Roundings assumed for a loss, in addition to its observed scatter.
const ROUNDINGS: f64 = 2.0;

/// A derivative along a direction. The default is for an empty direction, along which nothing
/// changes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Derivative {
    /// The derivative by differences of the loss.
    pub(super) expected: f64,
    /// The derivative by the gradient.
    pub(super) found: f64,
    /// The standard error of `expected`.
    scatter: f64,
    /// The uncertainty of `expected` due to the rounding of the loss.
    rounding: f64,
    /// The typical size of the derivative if the signs of the gradient's items were random: a scale
    /// for sums in which the items cancel by chance.
    typical: f64,
    /// The tolerated relative error.
    tolerance: f64,
    /// Whether the maximum number of cells was evaluated; only then is a gradient judged wrong.
    is_final: bool,
}

impl Derivative {
    pub(super) fn verdict(&self) -> Verdict {
        let off = (self.expected - self.found).abs();
        let tolerated = self.tolerance * self.size();
        if self.expected.is_finite() && !self.found.is_finite() {
            Verdict::Wrong
        } else if off == 0.0 && self.scatter == 0.0 {
            // Also for parameters that do not affect the loss.
            Verdict::Right
        } else if off + self.uncertainty() <= tolerated {
            Verdict::Right
        } else if self.is_final && off > tolerated + SURE * self.scatter + self.rounding {
            Verdict::Wrong
        } else {
            Verdict::Unclear
        }
    }

    /// Returns the uncertainty of `expected`, which is exceeded in one case of twenty.
    pub(super) fn uncertainty(&self) -> f64 {
        2.0 * self.scatter + self.rounding
    }

    fn size(&self) -> f64 {
        self.expected.abs().max(self.found.abs()).max(self.typical)
    }

    /// Returns the derivative with the stronger evidence against the gradient.
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

/// The border between two cells.
#[derive(Debug)]
struct CellEdge {
    values: Vec<Tensor>,
    loss: f64,
}

/// The slope of the loss over one cell.
#[derive(Clone, Copy, Debug)]
struct CellSlope {
    expected: f64,
    found: f64,
}

impl CellSlope {
    fn off(&self) -> f64 {
        self.expected - self.found
    }

    fn is_finite(&self) -> bool {
        self.off().is_finite()
    }
}

/// Measurements along a direction.
struct DirectionCells<'a> {
    part: &'a CheckedPart<'a>,
    direction: &'a [Tensor],
    width: f64,
    /// The largest loss on an edge.
    loss: f64,
    slopes: Vec<CellSlope>,
}

impl CheckedPart<'_> {
    /// Returns the derivative along a direction, using as many cells as necessary. Leaves the
    /// variables at the values of the last evaluation.
    #[track_caller]
    pub(super) fn derivative(
        &self,
        model: &mut impl Checked,
        direction: &[Tensor],
    ) -> Result<Derivative> {
        let width = WIDTH.max(4.0 * self.epsilon());
        let mut cells =
            DirectionCells { part: self, direction, width, loss: 0.0, slopes: Vec::new() };
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

    /// Returns the values at a point along the direction, in the dtypes the loss computes in.
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

    /// Returns the rounding unit of the variables' coarsest dtype, in which most of the loss is
    /// computed.
    fn epsilon(&self) -> f64 {
        self.dtypes.iter().map(|&dtype| rounding_unit(dtype)).fold(0.0, f64::max)
    }
}

fn rounding_unit(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f32::EPSILON.into(),
        DType::F16 => half::f16::EPSILON.to_f64(),
        _ => half::bf16::EPSILON.to_f64(),
    }
}

/// Positions count cells from the variables' own values, which lie in the middle of a cell.
impl DirectionCells<'_> {
    #[track_caller]
    fn edge(&mut self, model: &mut impl Checked, place: f64) -> Result<CellEdge> {
        let values = self.part.moved(self.direction, place * self.width).doing(CHECKING)?;
        self.part.set(model, &values)?;
        let loss = model.loss()?;
        self.loss = self.loss.max(loss.abs());
        Ok(CellEdge { values, loss })
    }

    #[track_caller]
    fn gradients(&self, model: &mut impl Checked, place: f64) -> Result<Vec<Tensor>> {
        let values = self.part.moved(self.direction, place * self.width).doing(CHECKING)?;
        self.part.set(model, &values)?;
        self.part.on_host(&model.gradients()?)
    }

    /// Returns the slope between two edges, the second on the given `side` of the first, by the
    /// gradients between them.
    fn slope(
        &self,
        [from, to]: [&CellEdge; 2],
        side: f64,
        gradients: &[Tensor],
    ) -> Result<CellSlope> {
        let change = predicted(&from.values, &to.values, gradients).doing(CHECKING)?;
        let width = side * self.width;
        Ok(CellSlope { expected: (to.loss - from.loss) / width, found: change / width })
    }

    /// Combines the cells.
    fn derivative(&self, is_final: bool) -> Result<Derivative> {
        let typical = self.part.typical(self.direction).doing(CHECKING)?;
        let epsilon = self.part.epsilon();
        let tolerance = TOLERANCE + ROUNDED * epsilon;
        // If the gradient is not finite at the variables themselves, training cannot use it.
        let middle = self.slopes[0];
        if middle.expected.is_finite() && !middle.found.is_finite() {
            let CellSlope { expected, found } = middle;
            return Ok(Derivative { expected, found, ..Derivative::default() });
        }
        // Away from the variables, the loss may legitimately be undefined.
        let slopes: Vec<&CellSlope> =
            self.slopes.iter().filter(|slope| slope.is_finite()).collect();
        let n = slopes.len() as f64;
        let mean =
            |value: fn(&CellSlope) -> f64| slopes.iter().map(|slope| value(slope)).sum::<f64>() / n;
        let off = mean(CellSlope::off);
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

/// Predicts the change of the loss from the gradients, between the values after rounding, which
/// differ noticeably in half precision.
fn predicted(from: &[Tensor], to: &[Tensor], gradients: &[Tensor]) -> candle_core::Result<f64> {
    let mut change = 0.0;
    for ((from, to), gradient) in from.iter().zip(to).zip(gradients) {
        let moved = (to.to_dtype(DType::F64)? - from.to_dtype(DType::F64)?)?;
        change += (moved * gradient)?.sum_all()?.to_scalar::<f64>()?;
    }
    Ok(change)
}
