//! Costs from measurements, by non-negative least squares.
//!
//! The exact solution of three coefficients needs no iteration: it is the least-squares solution of
//! the coefficients that are not zero, so the best of the seven subsets is the solution (Lawson and
//! Hanson, "Solving Least Squares Problems", 1974, chapter 23).

use crate::{
    config::cost::Cost,
    error::{Error, Result},
};

/// The cost of the longest measured sequence in integer units. Coefficients are rounded to units, so
/// each adds at most 1/2 unit per token or per pair of tokens: 2^-15 of the cost at 131,072 tokens.
/// Costs of 65,536 such sequences fit into 64 bits.
const UNITS_OF_LONGEST: f64 = (1_u64 << 48) as f64;

/// A cost fitted to measurements, from [`Cost::fit`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CostFit {
    /// Cost in units of [`seconds_per_unit`](Self::seconds_per_unit).
    pub cost: Cost,
    /// Seconds of one unit of cost.
    pub seconds_per_unit: f64,
    /// Root mean square of the differences between cost and measurement, in seconds.
    pub error_seconds: f64,
}

impl Cost {
    /// Fits a cost to measured lengths and seconds: the polynomial without negative coefficients that
    /// has the least sum of squared differences.
    ///
    /// # Errors
    ///
    /// [`Error::NoFit`] if no measurement is positive, or one is negative or not finite.
    ///
    /// # Examples
    ///
    /// ```
    /// use dyn_batch::Cost;
    ///
    /// // 1 ms per sequence, 2 µs per token and 1 ns per pair of tokens.
    /// let seconds = |length: f64| 1e-3 + 2e-6 * length + 1e-9 * length * length;
    /// let measured = [512, 1024, 2048, 4096, 8192].map(|l| (l, seconds(l as f64)));
    /// let fit = Cost::fit(&measured)?;
    /// assert!(fit.error_seconds < 1e-6);
    /// let predicted = fit.cost.for_length(16_384) as f64 * fit.seconds_per_unit;
    /// assert!((predicted / seconds(16_384.0) - 1.0).abs() < 1e-3);
    /// # Ok::<(), dyn_batch::Error>(())
    /// ```
    pub fn fit(measurements: &[(u64, f64)]) -> Result<CostFit> {
        let count = measurements.len() as u64;
        let longest =
            measurements.iter().map(|&(length, _)| length).max().unwrap_or(0).max(1) as f64;
        let is_valid = |&(_, seconds): &(u64, f64)| seconds.is_finite() && seconds >= 0.0;
        if !measurements.iter().all(is_valid) {
            return Err(Error::NoFit { count });
        }
        // Relative lengths keep the equations well conditioned.
        let points: Vec<([f64; 3], f64)> = measurements
            .iter()
            .map(|&(length, seconds)| {
                let x = length as f64 / longest;
                ([1.0, x, x * x], seconds)
            })
            .collect();
        let (coefficients, squares) = best_subset(&points).ok_or(Error::NoFit { count })?;
        let seconds_per_unit = coefficients.iter().sum::<f64>() / UNITS_OF_LONGEST;
        let units = |coefficient: f64, scale: f64| to_units(coefficient / scale / seconds_per_unit);
        let cost = Self {
            per_sequence: units(coefficients[0], 1.0),
            per_token: units(coefficients[1], longest),
            per_token_squared: units(coefficients[2], longest * longest),
        };
        let error_seconds = (squares / measurements.len() as f64).sqrt();
        Ok(CostFit { cost, seconds_per_unit, error_seconds })
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "coefficients are at least 0 and at most `UNITS_OF_LONGEST`"
)]
fn to_units(value: f64) -> u64 {
    value.round() as u64
}

/// Returns the coefficients with the least sum of squared differences, and this sum; `None` if all
/// coefficients are zero.
fn best_subset(points: &[([f64; 3], f64)]) -> Option<([f64; 3], f64)> {
    let mut best: Option<([f64; 3], f64)> = None;
    for subset in 1..8_u8 {
        let columns: Vec<usize> = (0..3).filter(|column| subset & (1 << column) != 0).collect();
        let Some(coefficients) = least_squares(points, &columns) else { continue };
        let squares = sum_of_squares(points, coefficients);
        let is_positive =
            coefficients.iter().all(|&c| c >= 0.0) && coefficients.iter().any(|&c| c > 0.0);
        if is_positive && best.is_none_or(|(_, least)| squares < least) {
            best = Some((coefficients, squares));
        }
    }
    best
}

fn sum_of_squares(points: &[([f64; 3], f64)], coefficients: [f64; 3]) -> f64 {
    let squares = points.iter().map(|&(powers, seconds)| {
        let predicted: f64 = (0..3).map(|column| powers[column] * coefficients[column]).sum();
        (predicted - seconds) * (predicted - seconds)
    });
    squares.sum()
}

/// Solves the normal equations of these columns by elimination with pivots; `None` if they are
/// singular, since there are too few different lengths.
fn least_squares(points: &[([f64; 3], f64)], columns: &[usize]) -> Option<[f64; 3]> {
    let n = columns.len();
    let mut rows = vec![vec![0.0; n + 1]; n];
    for (powers, seconds) in points {
        for (row, &i) in rows.iter_mut().zip(columns) {
            for (entry, &j) in row.iter_mut().zip(columns) {
                *entry += powers[i] * powers[j];
            }
            row[n] += powers[i] * seconds;
        }
    }
    for pivot in 0..n {
        let largest =
            (pivot..n).max_by(|&a, &b| rows[a][pivot].abs().total_cmp(&rows[b][pivot].abs()))?;
        rows.swap(pivot, largest);
        if rows[pivot][pivot].abs() < 1e-12 * points.len() as f64 {
            return None;
        }
        let pivot_row = rows[pivot].clone();
        for (_, row) in rows.iter_mut().enumerate().filter(|(other, _)| *other != pivot) {
            let factor = row[pivot] / pivot_row[pivot];
            for (entry, of_pivot) in row.iter_mut().zip(&pivot_row) {
                *entry -= factor * of_pivot;
            }
        }
    }
    let mut solution = [0.0; 3];
    for (row, &column) in columns.iter().enumerate() {
        solution[column] = rows[row][n] / rows[row][row];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_coefficients_become_zero() {
        // A falling time per token would need a negative coefficient.
        let fit = Cost::fit(&[(100, 1.0), (200, 1.5), (400, 2.0)]).unwrap();
        assert_eq!(fit.cost.per_token_squared, 0);
        assert!(fit.cost.per_sequence > 0 && fit.cost.per_token > 0);
        assert!(fit.error_seconds > 0.0 && fit.error_seconds < 0.2);
    }

    #[test]
    fn one_length_fits_exactly() {
        let fit = Cost::fit(&[(1 << 20, 0.25); 3]).unwrap();
        let predicted = fit.cost.for_length(1 << 20) as f64 * fit.seconds_per_unit;
        assert!((predicted - 0.25).abs() < 1e-3, "{fit:?}");
    }

    #[test]
    fn fit_beats_a_grid_of_coefficients() {
        let measured = [(10, 3.0), (20, 4.5), (30, 4.0), (50, 9.0), (80, 11.0)];
        let fit = Cost::fit(&measured).unwrap();
        let error = |a: f64, b: f64, c: f64| {
            let squares = measured.map(|(length, seconds): (u64, f64)| {
                let x = length as f64;
                (a + b * x + c * x * x - seconds).powi(2)
            });
            (squares.iter().sum::<f64>() / 5.0).sqrt()
        };
        for a in 0..40 {
            for b in 0..40 {
                for c in 0..20 {
                    let other =
                        error(f64::from(a) / 10.0, f64::from(b) / 100.0, f64::from(c) / 1e4);
                    assert!(fit.error_seconds <= other + 1e-9, "{a} {b} {c}");
                }
            }
        }
    }

    #[test]
    fn measurements_without_fit_are_rejected() {
        for measured in [vec![], vec![(5, 0.0)], vec![(5, f64::NAN)], vec![(5, 1.0), (6, -1.0)]] {
            let count = measured.len() as u64;
            assert_eq!(Cost::fit(&measured).unwrap_err(), Error::NoFit { count });
        }
    }
}
