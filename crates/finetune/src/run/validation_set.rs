//! Held-out examples for validation.

use candle_core::Device;
use dist_train::Evaluation;
use dyn_batch::Batch;

use crate::{
    data::dataset::{BatchTensors, DataSet},
    error::{Result, run::RunError},
    run::validations::ValidationPoint,
    spec::Spec,
};

/// Held-out examples in batches.
#[derive(Debug)]
pub(crate) struct ValidationSet {
    data: DataSet,
    micro_batches: Vec<Vec<Batch>>,
    every: u64,
}

impl ValidationSet {
    /// Batches examples like the steps of a run, to validate after every `every` steps.
    ///
    /// # Errors
    ///
    /// [`RunError::ValidationTooSmall`] if the examples are fewer than one step: the mean of so few
    /// would be too noisy.
    pub(crate) fn new(data: DataSet, spec: &Spec, every: u64) -> Result<Self> {
        let batch_size = spec.finetune.batch_size;
        let lengths = data.lengths();
        let (found, least, unit) = match batch_size {
            Some(batch_size) => (lengths.len() as u64, batch_size, "examples"),
            None => (lengths.iter().sum(), spec.max_tokens, "tokens"),
        };
        if found < least {
            return Err(RunError::ValidationTooSmall { found, least, unit }.into());
        }
        let (_, micro_batches) = spec.schedule(lengths)?.first_epoch()?;
        Ok(Self { data, micro_batches, every })
    }

    /// Returns the micro-batches, each with the batches of all ranks.
    pub(crate) fn micro_batches(&self) -> &[Vec<Batch>] {
        &self.micro_batches
    }

    /// Returns true if a run of `steps` validates after `done` of them.
    pub(crate) fn is_due(&self, done: u64, steps: u64) -> bool {
        done == steps || done.is_multiple_of(self.every)
    }

    /// Returns the mean loss of a model after `step` steps, or `None` if `evaluate` stops the
    /// validation by returning `None`.
    ///
    /// # Errors
    ///
    /// The errors of `evaluate`, and [`Error::Tensor`] if the device runs out of memory.
    pub(crate) fn validate(
        &self,
        step: u64,
        device: &Device,
        mut evaluate: impl FnMut(BatchTensors) -> Result<Option<Evaluation>>,
    ) -> Result<Option<ValidationPoint>> {
        let mut sum = 0.;
        let mut predictions = 0.;
        for batches in &self.micro_batches {
            let tensors = self.data.collate(batches, device)?;
            let Some(found) = evaluate(tensors)? else { return Ok(None) };
            sum += found.loss * found.weight;
            predictions += found.weight;
        }
        Ok(Some(ValidationPoint { step, loss: sum / predictions, predictions }))
    }
}
