//! The global norm of gradients, and the clipping of gradients to a maximum norm.

use candle_core::Result;

use crate::{error::training::TrainingError, optim::clip, step::rules::Rules};

/// Returns the norm of all gradients together. Each gradient is `factor` times a sum over the
/// slots, and `squared_norms` has the squared norm of this sum for each trained variable.
///
/// # Errors
///
/// Returns [`TrainingError::NonFiniteNorm`] unless non-finite
/// values are allowed.
pub(crate) fn global_norm(rules: &Rules, squared_norms: &[f64], factor: f64) -> Result<f64> {
    let norm = factor * squared_norms.iter().sum::<f64>().sqrt();
    if norm.is_finite() || rules.allow_non_finite {
        return Ok(norm);
    }
    let cause = squared_norms.iter().position(|squared_norm| !squared_norm.is_finite());
    let trained = rules.inventory.roles.trained();
    let variable = cause.map(|cause| rules.inventory.name(trained[cause]).to_owned());
    Err(rules.errors.record_agreed(TrainingError::NonFiniteNorm { value: norm, variable }))
}

/// Returns `factor`, multiplied by the clipping factor of gradients with this norm.
pub(crate) fn clipped_factor(rules: &Rules, norm: f64, factor: f64) -> f64 {
    factor * rules.max_norm.map_or(1.0, |max_norm| clip::factor(norm, max_norm))
}
