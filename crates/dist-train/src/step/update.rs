//! How the sums of gradients change variables, whoever keeps them.

use candle_core::{Result, Tensor, Var, backprop::GradStore};
use candle_nn::Optimizer;

use crate::{grad::scaled, optim::clip, step::rules::Rules};

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

/// Lets each optimizer make a step by `factor` times the sums.
pub(crate) fn update<'a, O: Optimizer + 'a>(
    optimizers: impl IntoIterator<Item = &'a mut O>,
    sums: impl IntoIterator<Item = (&'a Var, Tensor)>,
    factor: f64,
) -> Result<()> {
    let mut grads = GradStore::default();
    for (var, sum) in sums {
        // As it is: what a half cannot hold, an optimizer with masters can use.
        grads.insert(var, scaled(sum, factor)?);
    }
    optimizers.into_iter().try_for_each(|optimizer| optimizer.step(&grads))
}
