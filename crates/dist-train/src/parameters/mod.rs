//! The parameters of a model: declarations, initial values from a seed or from files, and
//! descriptions for planners.

pub(crate) mod declare;
pub(crate) mod describe;
pub(crate) mod init;

use std::{fmt, ops::Range, path::Path, sync::Arc};

use candle_core::{Device, Tensor};
use core_types::{Fingerprint, Seed};
use dist_checkpoint::{
    ParameterError, StoredWeights, TensorInfo,
    support::{AllowedNames, sampled},
};

use self::declare::Declared;
use crate::{
    error::{Doing, Result},
    step::roles::RolePatterns,
};

/// The source of initial values for parameters without pretrained weights.
#[derive(Clone)]
pub(crate) enum Initializer {
    /// The constructor's distributions, drawn from a seed.
    Seeded(Seed),
    /// A function of the caller.
    Given(Arc<ItemsFn>),
}

/// Returns items of a parameter, counted in row-major order, as a one-dimensional tensor.
pub(crate) type ItemsFn =
    dyn Fn(&Declared, Range<usize>) -> candle_core::Result<Tensor> + Send + Sync;

impl Initializer {
    /// Returns items `range` of a parameter as a one-dimensional tensor on `device`.
    fn items(&self, declared: &Declared, range: Range<usize>, device: &Device) -> Result<Tensor> {
        match self {
            Self::Seeded(seed) => init::seeded(*seed, declared, range, device),
            Self::Given(values) => {
                let items = values(declared, range.clone()).doing("initializing a parameter")?;
                check_items(declared, range, &items)?;
                items.to_device(device).doing("initializing a parameter")
            }
        }
    }

    /// Returns a fingerprint for comparison between processes: the seed, or for a function a
    /// fingerprint of sampled items of each parameter.
    ///
    /// # Errors
    ///
    /// Returns the errors of the function and of candle.
    pub(crate) fn fingerprint(&self, declared: &[Declared]) -> Result<u64> {
        if let Self::Seeded(seed) = self {
            return Ok(seed.as_u64());
        }
        let mut found = Fingerprint::new();
        for declared in declared {
            for run in sampled(declared.shape.elem_count()) {
                let items = self.items(declared, run, &Device::Cpu)?;
                let mut bytes = Vec::new();
                items.write_bytes(&mut bytes).doing("comparing initial values")?;
                found.write_bytes(&bytes);
            }
        }
        Ok(found.finish())
    }
}

impl fmt::Debug for Initializer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Seeded(seed) => seed.fmt(f),
            Self::Given(_) => f.write_str("a function"),
        }
    }
}

/// Rejects items of another shape or dtype than requested.
fn check_items(
    declared: &Declared,
    range: Range<usize>,
    items: &Tensor,
) -> Result<(), ParameterError> {
    let name = || declared.name.clone();
    if items.dims() != [range.len()] {
        let (found, expected) = (items.dims().to_vec(), vec![range.len()]);
        return Err(ParameterError::Shape { name: name(), found, expected });
    }
    if items.dtype() != declared.dtype {
        let (found, expected) = (items.dtype().as_str(), declared.dtype.as_str());
        return Err(ParameterError::Dtype { name: name(), found, expected });
    }
    Ok(())
}

/// Sources of the initial values of a model's parameters.
#[derive(Clone, Debug)]
pub(crate) struct InitialValues {
    /// The source for parameters without pretrained weights.
    pub(crate) init: Initializer,
    /// Pretrained weights.
    pub(crate) weights: Option<StoredWeights>,
}

impl InitialValues {
    /// Prepares the initial values of the `declared` parameters: from pretrained weights, and
    /// otherwise from the initializer. The weights must match the model except for names that
    /// patterns allow.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`StoredWeights::open`], [`StoredWeights::check_fits`] and of the
    /// patterns.
    pub(crate) fn new(
        init: Initializer,
        weights: Option<&Path>,
        patterns: &RolePatterns,
        declared: &[Declared],
    ) -> Result<Self> {
        let names: Vec<&str> = declared.iter().map(|declared| declared.name.as_str()).collect();
        let missing = patterns.missing(&names)?;
        let unexpected = patterns.unexpected()?;
        let Some(path) = weights else { return Ok(Self { init, weights: None }) };
        let weights = StoredWeights::open(path)?;
        let infos: Vec<TensorInfo> = declared.iter().map(Declared::info).collect();
        let allowed = AllowedNames { missing: &missing, unexpected: &unexpected };
        weights.check_fits(&infos, allowed)?;
        Ok(Self { init, weights: Some(weights) })
    }

    /// Returns a fingerprint of the [weights](StoredWeights::fingerprint), or of their absence.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`StoredWeights::fingerprint`].
    pub(crate) fn fingerprint(&self, declared: &[Declared]) -> Result<u64> {
        let infos: Vec<TensorInfo> = declared.iter().map(Declared::info).collect();
        let fingerprint = match &self.weights {
            Some(weights) => Some(weights.fingerprint(&infos)?),
            None => None,
        };
        Ok(Fingerprint::new()
            .write_u64(fingerprint.is_some().into())
            .write_u64(fingerprint.unwrap_or(0))
            .finish())
    }

    /// Returns the full value of a parameter.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`items`](Self::items).
    pub(crate) fn tensor(&self, declared: &Declared, device: &Device) -> Result<Tensor> {
        let items = self.items(declared, 0..declared.shape.elem_count(), device)?;
        items.reshape(&declared.shape).doing("initializing a parameter")
    }

    /// Returns items `range` of a parameter, counted in row-major order, as a one-dimensional
    /// tensor on `device`: from the weights if they contain the parameter, and otherwise from the
    /// initializer.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`StoredWeights::items`], [`init::seeded`] and the caller's function,
    /// and [`ParameterError::Shape`] or [`ParameterError::Dtype`] if the function returns another
    /// shape or dtype.
    pub(crate) fn items(
        &self,
        declared: &Declared,
        range: Range<usize>,
        device: &Device,
    ) -> Result<Tensor> {
        if let Some(weights) = &self.weights
            && let Some(items) = weights.items(&declared.info(), range.clone(), device)?
        {
            return Ok(items);
        }
        self.init.items(declared, range, device)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use candle_nn::Init;

    use super::*;
    use crate::error::Error;

    fn declared() -> Declared {
        Declared {
            name: "w".to_owned(),
            shape: (2, 3).into(),
            dtype: DType::F32,
            init: Init::Const(0.0),
        }
    }

    fn given(
        values: impl Fn(&Declared, Range<usize>) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    ) -> InitialValues {
        InitialValues { init: Initializer::Given(Arc::new(values)), weights: None }
    }

    #[test]
    fn mismatched_items_are_rejected() {
        let refused = |values: InitialValues| match values
            .items(&declared(), 1..4, &Device::Cpu)
            .unwrap_err()
        {
            Error::Parameter(error) => error,
            error => panic!("{error}"),
        };
        let all = given(|declared, _| Tensor::zeros(&declared.shape, DType::F32, &Device::Cpu));
        assert!(matches!(
            refused(all),
            ParameterError::Shape { found, expected, .. } if (&*found, &*expected) == (&[2, 3], &[3])
        ));
        let wide = given(|_, range| Tensor::zeros(range.len(), DType::F64, &Device::Cpu));
        assert!(matches!(refused(wide), ParameterError::Dtype { found: "f64", .. }));
    }

    #[test]
    fn fingerprints_depend_on_returned_values() {
        let fingerprint = |factor: f32| {
            let values = given(move |_, range: Range<usize>| {
                let values: Vec<f32> = range.map(|item| factor * item as f32).collect();
                Tensor::new(values, &Device::Cpu)
            });
            values.init.fingerprint(&[declared()]).unwrap()
        };
        assert_eq!(fingerprint(1.0), fingerprint(1.0));
        assert_ne!(fingerprint(1.0), fingerprint(2.0));
        let seeded = |seed| Initializer::Seeded(Seed::new(seed)).fingerprint(&[]).unwrap();
        assert_ne!(seeded(1), seeded(2));
    }
}
