//! Slopes of a loss along a direction, by differences of the loss and by its gradients.
//!
//! The line through the variables along the direction is divided into cells. The difference of the
//! loss over a cell is the integral of the gradient, which is approximated by the gradient in the
//! middle of the cell. So the comparison has no first-order error for any cell width. A kink of the
//! loss disturbs only the cell that contains the kink, and may raise or lower its slope, but a
//! wrong gradient has the same error in all cells. The uncertainty of the mean over the cells
//! follows from their scatter.
//!
//! Differences of the loss alone, without gradients between the points, fail even with
//! extrapolation: in a network with ReLU, any step that is large compared with the rounding of the
//! loss contains thousands of kinks. For a transformer in double precision, two neighboring step
//! sizes agreed to 1 % on a derivative twice as large as the gradient; the mean over 17 cells
//! differed from the gradient by 1.5 ± 8 %.

use candle_core::{DType, Tensor};

use super::{CHECKING, Checked, CheckedPart};
use crate::{
    error::{Doing, Result},
    gradient_report::Verdict,
};

/// The minimum cell width, in units of the direction. Narrow cells contain few kinks, and with this
/// width a loss difference in single precision still has four digits.
const MIN_CELL_WIDTH: f64 = 1.0 / 256.0;

/// The maximum number of cells on either side of the middle cell. With this number, the relative
/// error of the scatter is about a sixth.
const CELLS_PER_SIDE: usize = 8;

/// The tolerated relative error of a gradient. Rounding in single precision causes less than a
/// hundredth of this error, and an operation without a backward pass mostly causes far more than
/// this error.
const TOLERANCE: f64 = 0.02;

/// The number of rounding errors that are tolerated in each item of a gradient, in addition to
/// [`TOLERANCE`]; they matter in half precision only.
const GRADIENT_ROUNDINGS: f64 = 8.0;

/// A gradient is wrong if its error exceeds the tolerance by more than this number of standard
/// errors. This happens by chance in one of ten thousand cases (Student's t with 16 degrees of
/// freedom), and less often for errors with long tails.
const WRONG_AT_STANDARD_ERRORS: f64 = 5.0;

/// The number of rounding errors that are assumed in a loss, in addition to its observed scatter.
const LOSS_ROUNDINGS: f64 = 2.0;

/// The derivative of a loss along a direction, measured and according to the gradient. The default
/// is the derivative along an empty direction, which is 0.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Derivative {
    /// The derivative measured by differences of the loss.
    pub(super) expected: f64,
    /// The derivative according to the gradient.
    pub(super) found: f64,
    /// The standard error of `expected`.
    scatter: f64,
    /// The uncertainty of `expected` due to the rounding of the loss.
    rounding: f64,
    /// The size of the derivative if the signs of the gradient's items were random: the minimum
    /// scale of errors, for derivatives in which the items cancel by chance.
    random_size: f64,
    /// The tolerated relative error.
    tolerance: f64,
    /// Whether all cells were evaluated; only then is a finite gradient judged wrong.
    is_final: bool,
}

impl Derivative {
    pub(super) fn verdict(&self) -> Verdict {
        let error = self.error();
        let tolerated = self.tolerance * self.size();
        let wrong_above = tolerated + WRONG_AT_STANDARD_ERRORS * self.scatter + self.rounding;
        if self.expected.is_finite() && !self.found.is_finite() {
            Verdict::Wrong
        } else if error == 0.0 && self.scatter == 0.0 {
            // Also for parameters that do not affect the loss.
            Verdict::Right
        } else if error + self.uncertainty() <= tolerated {
            Verdict::Right
        } else if self.is_final && error > wrong_above {
            Verdict::Wrong
        } else {
            Verdict::Unclear
        }
    }

    /// Returns the uncertainty of `expected`; the error exceeds it in one case of twenty.
    pub(super) fn uncertainty(&self) -> f64 {
        2.0 * self.scatter + self.rounding
    }

    /// Returns the absolute difference between the measured derivative and the gradient's.
    fn error(&self) -> f64 {
        (self.expected - self.found).abs()
    }

    /// Returns the scale of the relative error.
    fn size(&self) -> f64 {
        self.expected.abs().max(self.found.abs()).max(self.random_size)
    }

    /// Returns the derivative with the stronger evidence against the gradient.
    pub(super) fn or_worse(self, other: Self) -> Self {
        let rank = |derivative: &Self| match derivative.verdict() {
            Verdict::Right => 0,
            Verdict::Unclear => 1,
            Verdict::Wrong => 2,
        };
        let relative_error = |derivative: &Self| derivative.error() / derivative.size();
        let is_worse = match rank(&other).cmp(&rank(&self)) {
            // The error of an empty direction is 0 / 0, and any other derivative replaces it.
            std::cmp::Ordering::Equal => {
                relative_error(&other) > relative_error(&self) || relative_error(&self).is_nan()
            }
            order => order.is_gt(),
        };
        if is_worse { other } else { self }
    }
}

/// The variables and the loss at the border between two cells.
#[derive(Debug)]
struct CellEdge {
    values: Vec<Tensor>,
    loss: f64,
}

/// The slope of the loss over one cell.
#[derive(Clone, Copy, Debug)]
struct CellSlope {
    /// The slope measured by the difference of the loss.
    expected: f64,
    /// The slope according to the gradient.
    found: f64,
}

impl CellSlope {
    fn error(&self) -> f64 {
        self.expected - self.found
    }

    fn is_finite(&self) -> bool {
        self.error().is_finite()
    }
}

/// The measured cells along a direction.
struct DirectionCells<'a> {
    part: &'a CheckedPart<'a>,
    direction: &'a [Tensor],
    /// The width of a cell, in units of the direction.
    width: f64,
    /// The largest absolute loss on an edge.
    max_abs_loss: f64,
    /// The slopes of the cells, the middle cell first.
    slopes: Vec<CellSlope>,
}

impl CheckedPart<'_> {
    /// Returns the derivative along a direction, measured over as many cells as a clear verdict
    /// needs. Leaves the variables at the values of the last evaluation.
    #[track_caller]
    pub(super) fn derivative(
        &self,
        model: &mut impl Checked,
        direction: &[Tensor],
    ) -> Result<Derivative> {
        let width = MIN_CELL_WIDTH.max(4.0 * self.epsilon());
        let mut cells =
            DirectionCells { part: self, direction, width, max_abs_loss: 0.0, slopes: Vec::new() };
        let mut ends = [cells.edge(model, -0.5)?, cells.edge(model, 0.5)?];
        let middle = cells.slope([&ends[0], &ends[1]], 1.0, &self.gradients)?;
        cells.slopes.push(middle);
        let mut n = 0;
        loop {
            n += 1;
            for (end, side) in ends.iter_mut().zip([-1.0, 1.0]) {
                let position = side * n as f64;
                let gradients = cells.gradients(model, position)?;
                let next = cells.edge(model, position + 0.5 * side)?;
                let slope = cells.slope([end, &next], side, &gradients)?;
                cells.slopes.push(slope);
                *end = next;
            }
            let is_final = n == CELLS_PER_SIDE;
            let derivative = cells.derivative(is_final)?;
            if is_final || derivative.verdict() != Verdict::Unclear {
                return Ok(derivative);
            }
        }
    }

    /// Returns the variables moved by `distance` along the direction, in their compute
    /// dtypes.
    fn values_at(&self, direction: &[Tensor], distance: f64) -> candle_core::Result<Vec<Tensor>> {
        let values = self.values.iter().zip(direction).zip(&self.dtypes);
        let moved_values = values.map(|((value, direction), &dtype)| {
            (value.to_dtype(DType::F64)? + (direction * distance)?)?.to_dtype(dtype)
        });
        moved_values.collect()
    }

    /// Returns the size of the derivative along the direction if the signs of the gradient's items
    /// were random.
    fn random_size(&self, direction: &[Tensor]) -> candle_core::Result<f64> {
        let mut squares = 0.0;
        for (gradient, direction) in self.gradients.iter().zip(direction) {
            squares += (gradient * direction)?.sqr()?.sum_all()?.to_scalar::<f64>()?;
        }
        Ok(squares.sqrt())
    }

    /// Returns the rounding unit of the coarsest dtype of the variables. Most of the loss is
    /// computed in this dtype.
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

/// A position is a number of cells from the variables' own values, which are in the middle of the
/// first cell.
impl DirectionCells<'_> {
    /// Moves the variables to a position, and evaluates the loss there.
    #[track_caller]
    fn edge(&mut self, model: &mut impl Checked, position: f64) -> Result<CellEdge> {
        let values = self.part.values_at(self.direction, position * self.width).doing(CHECKING)?;
        self.part.set(model, &values)?;
        let loss = model.loss()?;
        self.max_abs_loss = self.max_abs_loss.max(loss.abs());
        Ok(CellEdge { values, loss })
    }

    /// Moves the variables to a position, and returns the gradients there.
    #[track_caller]
    fn gradients(&self, model: &mut impl Checked, position: f64) -> Result<Vec<Tensor>> {
        let values = self.part.values_at(self.direction, position * self.width).doing(CHECKING)?;
        self.part.set(model, &values)?;
        self.part.on_host(&model.gradients()?)
    }

    /// Returns the slope of the cell between two edges, with the gradients in the middle of the
    /// cell. `side` is 1 if the second edge is farther along the direction, and otherwise -1.
    fn slope(
        &self,
        [from, to]: [&CellEdge; 2],
        side: f64,
        gradients: &[Tensor],
    ) -> Result<CellSlope> {
        let change = predict_change(&from.values, &to.values, gradients).doing(CHECKING)?;
        let width = side * self.width;
        Ok(CellSlope { expected: (to.loss - from.loss) / width, found: change / width })
    }

    /// Returns the mean slope of the cells measured so far. `is_final` states whether they are all.
    fn derivative(&self, is_final: bool) -> Result<Derivative> {
        let random_size = self.part.random_size(self.direction).doing(CHECKING)?;
        let epsilon = self.part.epsilon();
        let tolerance = TOLERANCE + GRADIENT_ROUNDINGS * epsilon;
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
        let mean_error = mean(CellSlope::error);
        let squared_deviations: f64 =
            slopes.iter().map(|slope| (slope.error() - mean_error).powi(2)).sum();
        Ok(Derivative {
            expected: mean(|slope| slope.expected),
            found: mean(|slope| slope.found),
            scatter: (squared_deviations / (n - 1.0) / n).sqrt(),
            rounding: LOSS_ROUNDINGS * epsilon * self.max_abs_loss / (n * self.width),
            random_size,
            tolerance,
            is_final,
        })
    }
}

/// Predicts the change of the loss between two edges from the gradients. The values of the edges
/// are rounded, so in half precision their distance differs noticeably from the cell width.
fn predict_change(
    from: &[Tensor],
    to: &[Tensor],
    gradients: &[Tensor],
) -> candle_core::Result<f64> {
    let mut change = 0.0;
    for ((from, to), gradient) in from.iter().zip(to).zip(gradients) {
        let difference = (to.to_dtype(DType::F64)? - from.to_dtype(DType::F64)?)?;
        change += (difference * gradient)?.sum_all()?.to_scalar::<f64>()?;
    }
    Ok(change)
}
