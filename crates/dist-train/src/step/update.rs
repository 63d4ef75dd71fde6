//! The norm of all gradients, and their clipping.

use candle_core::Result;

use crate::{optim::clip, step::rules::Rules};

/// Returns the norm of all gradients. A gradient is `factor` times a sum, and `squares` has the sum
/// of squares of each trained variable's sum.
///
/// # Errors
///
/// Returns [`TrainingError::NonFiniteNorm`](crate::TrainingError::NonFiniteNorm) unless non-finite
/// values are allowed.
pub(crate) fn norm(rules: &Rules, squares: &[f64], factor: f64) -> Result<f64> {
    let norm = factor * squares.iter().sum::<f64>().sqrt();
    if norm.is_finite() || rules.allow_non_finite {
        return Ok(norm);
    }
    let cause = squares.iter().position(|squares| !squares.is_finite());
    Err(rules.non_finite_norm(norm, cause))
}

/// Returns `factor`, reduced if gradients of this norm must be clipped.
pub(crate) fn clipped(rules: &Rules, norm: f64, factor: f64) -> f64 {
    factor * rules.max_norm.map_or(1.0, |max_norm| clip::factor(norm, max_norm))
}
