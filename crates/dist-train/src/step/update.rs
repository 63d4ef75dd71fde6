//! Updates of variables from reduced gradients, for both layouts.

use candle_core::{Result, Tensor, Var, backprop::GradStore};
use candle_nn::Optimizer;

use crate::{grad::scaled, optim::clip, step::rules::Rules};

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

/// Makes a step of each optimizer with `factor` times the sums.
pub(crate) fn update<'a, O: Optimizer + 'a>(
    optimizers: impl IntoIterator<Item = &'a mut O>,
    sums: impl IntoIterator<Item = (&'a Var, Tensor)>,
    factor: f64,
) -> Result<()> {
    let mut grads = GradStore::default();
    for (var, sum) in sums {
        // Gradients stay in single precision for half-precision variables, because master weights
        // use the extra digits.
        grads.insert(var, scaled(sum, factor)?);
    }
    optimizers.into_iter().try_for_each(|optimizer| optimizer.step(&grads))
}
