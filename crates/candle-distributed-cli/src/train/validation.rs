//! Examples that nothing is learnt from, by which it is seen how much was learnt.

use std::{io, path::Path};

use candle_core::Device;
use candle_distributed::batch::Batch;
use serde::{Deserialize, Deserializer, Serialize};

use crate::{
    error::{Error, Result},
    hint, input, output,
    train::{dataset::DataSet, distributed::Distributed, settings::Settings},
};

/// The file of a run with what its validations have found, a line each.
pub(crate) const FILE: &str = "validation.jsonl";

/// Held-out examples in batches, and how often the model is tried on them.
#[derive(Debug)]
pub(crate) struct HeldOut {
    data: DataSet,
    steps: Vec<Vec<Batch>>,
    every: u64,
}

/// What a validation has found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Validated {
    /// The number of steps that were done.
    pub(crate) step: u64,
    /// The mean loss of all predictions; NaN, and `null` in JSON, if it is not finite.
    #[serde(deserialize_with = "number")]
    pub(crate) loss: f64,
    pub(crate) predictions: f64,
}

/// A number; JSON writes `null` for NaN and the infinities.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// What did best, if something has a loss that is finite.
pub(crate) fn best(found: &[Validated]) -> Option<Validated> {
    let finite = found.iter().filter(|found| found.loss.is_finite());
    finite.min_by(|left, right| left.loss.total_cmp(&right.loss)).copied()
}

impl HeldOut {
    /// Examples of which a run with these settings makes steps.
    ///
    /// # Errors
    ///
    /// If they are less than a step: the mean of so few would go up and down by chance.
    pub(crate) fn new(data: DataSet, settings: &Settings, every: u64) -> Result<Self> {
        let batch_size = settings.finetune.as_ref().and_then(|finetune| finetune.batch_size);
        let lengths = data.lengths();
        let (found, least, unit) = match batch_size {
            Some(batch_size) => (lengths.len() as u64, batch_size, "examples"),
            None => (lengths.iter().sum(), settings.max_tokens, "tokens"),
        };
        if found < least {
            let few =
                format!("--validation holds out {found} {unit}, less than the {least} of a step");
            return Err(Error::usage(few).hinted(hint::SMALL_VALIDATION));
        }
        let (_, steps) = settings.schedule(lengths)?.first_epoch()?;
        Ok(Self { data, steps, every })
    }

    /// Whether the model is tried after so many of all steps.
    pub(crate) fn is_due(&self, done: u64, steps: u64) -> bool {
        done == steps || done.is_multiple_of(self.every)
    }

    /// The mean loss after so many steps.
    pub(crate) fn validate(
        &self,
        model: &mut Distributed,
        step: u64,
        device: &Device,
    ) -> Result<Validated> {
        let (mut sum, mut predictions) = (0., 0.);
        for batches in &self.steps {
            let found = model.evaluate(self.data.collate(batches, device)?)?;
            sum += found.loss * found.weight;
            predictions += found.weight;
        }
        Ok(Validated { step, loss: sum / predictions, predictions })
    }
}

/// Drops from the file of the run in `path` what validations have found after so many steps, which
/// are about to be done again.
pub(crate) fn keep_up_to(path: &Path, steps: u64) -> Result<()> {
    let kept = found_in(path, steps)?;
    let mut lines = Vec::new();
    for found in kept {
        let line = serde_json::to_vec(&found).map_err(io::Error::from);
        lines.extend(line.map_err(|source| Error::write(path.join(FILE), source))?);
        lines.push(b'\n');
    }
    if lines.is_empty() && !path.join(FILE).exists() {
        return Ok(());
    }
    output::file(&path.join(FILE), &lines)
}

/// What the validations of the run in `path` have found up to this number of steps.
pub(crate) fn found_in(path: &Path, steps: u64) -> Result<Vec<Validated>> {
    let path = path.join(FILE);
    let Some(text) = input::read_if_there(&path)? else { return Ok(Vec::new()) };
    // The last line may have been cut off, and its step is done again.
    let lines =
        text.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    Ok(lines.filter(|found: &Validated| found.step <= steps).collect())
}
