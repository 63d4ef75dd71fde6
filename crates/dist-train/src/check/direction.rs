//! Directions for moving variables, in double precision, one tensor per variable.

use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use core_types::Seed;

use super::{CHECKING, CheckedPart};
use crate::{
    error::{Doing, Result},
    parameters::{declare::Declared, init},
};

/// The least magnitude that is assumed for a variable's items, for biases and other variables that
/// start at zero.
const MIN_RMS: f64 = 1e-2;

/// Returns the gradient as a direction, scaled so that its largest item equals the mean RMS of the
/// variables. The loss changes most along the gradient, so this direction reveals a
/// gradient that is too large or should be zero.
pub(super) fn steepest(part: &CheckedPart<'_>) -> Result<Vec<Tensor>> {
    scale_gradients(part).doing(CHECKING)
}

fn scale_gradients(part: &CheckedPart<'_>) -> candle_core::Result<Vec<Tensor>> {
    let total_rms = part.values.iter().map(rms).sum::<candle_core::Result<f64>>()?;
    let mut largest: f64 = 0.0;
    let gradients: Vec<Tensor> =
        part.gradients.iter().map(replace_non_finite).collect::<candle_core::Result<_>>()?;
    for gradient in &gradients {
        if gradient.elem_count() > 0 {
            largest = largest.max(gradient.abs()?.flatten_all()?.max(0)?.to_scalar()?);
        }
    }
    let scale = if largest > 0.0 { total_rms / part.values.len() as f64 / largest } else { 0.0 };
    gradients.iter().map(|gradient| gradient * scale).collect()
}

/// Replaces infinite and NaN items of a gradient by zeros, because losses along such a direction
/// cannot be compared.
fn replace_non_finite(gradient: &Tensor) -> candle_core::Result<Tensor> {
    // Infinity times 0 is NaN, which is not equal to 0.
    let is_finite = (gradient * 0.0)?.eq(0.0)?;
    is_finite.where_cond(gradient, &gradient.zeros_like()?)
}

/// Draws a direction of normal numbers, with the RMS of each variable. A missing part of a
/// gradient may be orthogonal to the rest of the gradient, and this direction reveals it.
pub(super) fn random(part: &CheckedPart<'_>) -> Result<Vec<Tensor>> {
    let named = part.names.iter().zip(&part.values);
    named
        .map(|(name, value)| {
            let stdev = rms(value).doing(CHECKING)?;
            let declared = Declared {
                name: (*name).to_owned(),
                shape: value.shape().clone(),
                dtype: DType::F64,
                init: Init::Randn { mean: 0.0, stdev },
            };
            let items = init::seeded(SEED, &declared, 0..value.elem_count(), &Device::Cpu)?;
            items.reshape(value.shape()).doing(CHECKING)
        })
        .collect()
}

/// An arbitrary seed, different from the seeds of initial values.
const SEED: Seed = Seed::new(0x6772_6164);

/// Returns the root mean square of a variable's items, at least [`MIN_RMS`].
fn rms(value: &Tensor) -> candle_core::Result<f64> {
    let squares = value.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>()?;
    Ok((squares / value.elem_count().max(1) as f64).sqrt().max(MIN_RMS))
}
