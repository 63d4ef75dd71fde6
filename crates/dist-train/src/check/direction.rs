//! Directions for moving variables, in double precision, one tensor per variable.

use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use core_types::Seed;

use super::{CHECKING, CheckedPart};
use crate::{
    error::{Doing, Result},
    parameters::{declare::Declared, init},
};

/// The minimum assumed size of items, for biases and other variables that start at zero.
const SMALLEST: f64 = 1e-2;

/// Returns the gradient as a direction, scaled so that its largest item equals the variables'
/// average size. The loss changes most along it, so it reveals a gradient that is too large or
/// should be zero.
pub(super) fn steepest(part: &CheckedPart<'_>) -> Result<Vec<Tensor>> {
    scaled_gradients(part).doing(CHECKING)
}

fn scaled_gradients(part: &CheckedPart<'_>) -> candle_core::Result<Vec<Tensor>> {
    let size = part.at.iter().map(size_of_items).sum::<candle_core::Result<f64>>()?;
    let mut largest: f64 = 0.0;
    let gradients = part.gradients.iter().map(finite_items);
    let gradients: Vec<Tensor> = gradients.collect::<candle_core::Result<_>>()?;
    for gradient in &gradients {
        if gradient.elem_count() > 0 {
            largest = largest.max(gradient.abs()?.flatten_all()?.max(0)?.to_scalar()?);
        }
    }
    let scale = if largest > 0.0 { size / part.at.len() as f64 / largest } else { 0.0 };
    gradients.iter().map(|gradient| gradient * scale).collect()
}

/// Replaces infinite and NaN items of a gradient by zeros, because losses along such a direction
/// cannot be compared.
fn finite_items(gradient: &Tensor) -> candle_core::Result<Tensor> {
    // Infinity times 0 is NaN, which is not equal to 0.
    let is_finite = (gradient * 0.0)?.eq(0.0)?;
    is_finite.where_cond(gradient, &gradient.zeros_like()?)
}

/// Draws normal numbers with the size of each variable's items. This direction reveals missing
/// parts of a gradient, which may be orthogonal to the gradient.
pub(super) fn random(part: &CheckedPart<'_>) -> Result<Vec<Tensor>> {
    let named = part.names.iter().zip(&part.at);
    named
        .map(|(name, at)| {
            let stdev = size_of_items(at).doing(CHECKING)?;
            let declared = Declared {
                name: (*name).to_owned(),
                shape: at.shape().clone(),
                dtype: DType::F64,
                init: Init::Randn { mean: 0.0, stdev },
            };
            let items = init::seeded(SEED, &declared, 0..at.elem_count(), &Device::Cpu)?;
            items.reshape(at.shape()).doing(CHECKING)
        })
        .collect()
}

/// An arbitrary seed, different from the seeds of initial values.
const SEED: Seed = Seed::new(0x6772_6164);

/// Returns the root mean square of a variable's items.
fn size_of_items(at: &Tensor) -> candle_core::Result<f64> {
    let squares = at.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>()?;
    Ok((squares / at.elem_count().max(1) as f64).sqrt().max(SMALLEST))
}
