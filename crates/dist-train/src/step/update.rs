//! The norm of all gradients, and their clipping.

use candle_core::Result;

use crate::{optim::clip, step::rules::Rules};

/// The norm of all gradients, which are `factor` times sums with these squares, one for each
/// trained variable.
///
/// # Errors
///
/// [`TrainingError::NonFiniteNorm`](crate::TrainingError::NonFiniteNorm), unless that is allowed.
pub(crate) fn norm(rules: &Rules, squares: &[f64], factor: f64) -> Result<f64> {
    let norm = factor * squares.iter().sum::<f64>().sqrt();
    if norm.is_finite() || rules.allow_non_finite {
        return Ok(norm);
    }
    let cause = squares.iter().position(|squares| !squares.is_finite());
    Err(rules.non_finite_norm(norm, cause))
}

/// What sums are multiplied by, of gradients that are `factor` times them and have this norm.
pub(crate) fn clipped(rules: &Rules, norm: f64, factor: f64) -> f64 {
    factor * rules.max_norm.map_or(1.0, |max_norm| clip::factor(norm, max_norm))
}
