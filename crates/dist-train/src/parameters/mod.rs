//! The parameters of a model: what its constructor asks for, where the first values come from, a
//! seed or files, and the files that the trained ones are saved in.

pub(crate) mod declare;
pub(crate) mod init;
pub(crate) mod save;
pub(crate) mod weights;

use std::{ops::Range, path::Path};

use candle_core::{Device, Tensor};
use core_types::{Fingerprint, Seed};

use self::{
    declare::Declared,
    weights::{Allowed, Weights},
};
use crate::{
    error::{Doing, Result, training::TrainingError},
    step::roles::Choices,
};

/// Where the first values of a model's parameters come from.
#[derive(Clone, Debug)]
pub(crate) struct InitialValues {
    /// Decides on all that the weights do not have.
    pub(crate) seed: Seed,
    /// Pretrained weights.
    pub(crate) weights: Option<Weights>,
}

impl InitialValues {
    /// The values of parameters: from pretrained weights, which must be those of the model but for
    /// what the choices allow, and else from a seed. With each parameter stands whether it is open:
    /// others have a value already.
    ///
    /// # Errors
    ///
    /// [`TrainingError::TwoValues`] if the weights have one that is not open, and those of
    /// [`Weights::open`], [`Weights::check_fits`] and of the choices' patterns.
    pub(crate) fn new<'a>(
        seed: Seed,
        weights: Option<&Path>,
        choices: &Choices,
        declared: impl Iterator<Item = (&'a Declared, bool)>,
    ) -> Result<Self> {
        let (open, there): (Vec<_>, Vec<_>) = declared.partition(|(_, is_open)| *is_open);
        let all = open.iter().chain(&there).map(|(declared, _)| declared.name.as_str());
        let missing = choices.missing(&all.collect::<Vec<_>>())?;
        let unexpected = choices.unexpected()?;
        let Some(path) = weights else { return Ok(Self { seed, weights: None }) };
        let weights = Weights::open(path)?;
        if let Some((twice, _)) = there.iter().find(|(declared, _)| weights.has(&declared.name)) {
            return Err(TrainingError::TwoValues { name: twice.name.clone() }.into());
        }
        let open: Vec<Declared> = open.into_iter().map(|(declared, _)| declared.clone()).collect();
        weights.check_fits(&open, Allowed { missing: &missing, unexpected: &unexpected })?;
        Ok(Self { seed, weights: Some(weights) })
    }

    /// A fingerprint of the [weights](Weights::fingerprint), or of their absence.
    ///
    /// # Errors
    ///
    /// Those of [`Weights::fingerprint`].
    pub(crate) fn fingerprint(&self, declared: &[Declared]) -> Result<u64> {
        let weights = self.weights.as_ref().map(|weights| weights.fingerprint(declared));
        let weights = weights.transpose()?;
        Ok(Fingerprint::new().word(weights.is_some().into()).word(weights.unwrap_or(0)).finish())
    }

    /// The whole value of a parameter.
    ///
    /// # Errors
    ///
    /// Those of [`items`](Self::items).
    pub(crate) fn tensor(&self, declared: &Declared, device: &Device) -> Result<Tensor> {
        let items = self.items(declared, 0..declared.shape.elem_count(), device)?;
        items.reshape(&declared.shape).doing("initializing a parameter")
    }

    /// Items `range` of a parameter, counted in row-major order, as one dimension on `device`: from
    /// the weights if they have the parameter, and otherwise from the seed.
    ///
    /// # Errors
    ///
    /// Those of [`Weights::items`] and [`init::seeded`].
    pub(crate) fn items(
        &self,
        declared: &Declared,
        range: Range<usize>,
        device: &Device,
    ) -> Result<Tensor> {
        if let Some(weights) = &self.weights
            && let Some(items) = weights.items(declared, range.clone(), device)?
        {
            return Ok(items);
        }
        init::seeded(self.seed, declared, range, device)
    }
}
