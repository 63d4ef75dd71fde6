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
        let batch_size = settings.finetune.batch_size;
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

    /// The batches of its steps.
    pub(crate) fn steps(&self) -> &[Vec<Batch>] {
        &self.steps
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
/// are about to be done again. A file with damage is kept beside.
pub(crate) fn keep_up_to(path: &Path, steps: u64) -> Result<()> {
    let path = path.join(FILE);
    let Some(text) = input::read_if_there(&path)? else { return Ok(()) };
    let (found, damaged) = parse(&text);
    output::keep_damaged(&path, &damaged, &text)?;
    let mut lines = Vec::new();
    for found in found.iter().filter(|found| found.step <= steps) {
        let line = serde_json::to_vec(found).map_err(io::Error::from);
        lines.extend(line.map_err(|source| Error::write(&path, source))?);
        lines.push(b'\n');
    }
    output::file(&path, &lines)
}

/// What the validations of the run in `path` have found up to this number of steps. Damaged lines are
/// left out, and said.
pub(crate) fn found_in(path: &Path, steps: u64) -> Result<Vec<Validated>> {
    let path = path.join(FILE);
    let Some(text) = input::read_if_there(&path)? else { return Ok(Vec::new()) };
    let (mut found, damaged) = parse(&text);
    if !damaged.is_empty() {
        output::warning(format_args!("{} {}", path.display(), output::damage(&damaged)));
    }
    found.retain(|found| found.step <= steps);
    Ok(found)
}

/// What a file has, and the numbers of its damaged lines, from 1. Only a last line without an end is
/// as a run leaves it that is killed.
fn parse(text: &[u8]) -> (Vec<Validated>, Vec<u64>) {
    let mut lines: Vec<&[u8]> = text.split(|&byte| byte == b'\n').collect();
    let last: Option<Validated> = lines.pop().and_then(|last| serde_json::from_slice(last).ok());
    let (mut found, mut damaged) = (Vec::new(), Vec::new());
    for (number, line) in (1..).zip(lines) {
        match serde_json::from_slice(line) {
            Ok(line) => found.push(line),
            Err(_) => damaged.push(number),
        }
    }
    found.extend(last);
    (found, damaged)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_line_that_was_cut_off_is_dropped_and_damage_is_kept_beside() {
        let run = tempfile::tempdir().unwrap();
        let at = |name: &str| run.path().join(name);
        let line = |step| format!("{{\"step\":{step},\"loss\":1.5,\"predictions\":2.0}}\n");
        let kept_of = |text: &str, steps| {
            fs::write(at(FILE), text).unwrap();
            keep_up_to(run.path(), steps).unwrap();
            fs::read_to_string(at(FILE)).unwrap()
        };
        let killed = line(4) + &line(8) + "{\"ste";
        assert_eq!(kept_of(&killed, 8), line(4) + &line(8));
        assert_eq!(kept_of(&killed, 4), line(4));
        assert!(!at("validation.damaged-0001.jsonl").exists());
        let damaged = line(4) + "damage\n" + &line(12);
        assert_eq!(kept_of(&damaged, 12), line(4) + &line(12));
        assert_eq!(fs::read_to_string(at("validation.damaged-0001.jsonl")).unwrap(), damaged);
    }

    #[test]
    fn a_loss_that_is_not_finite_is_read_back_and_is_not_the_best() {
        let found = |step, loss| Validated { step, loss, predictions: 2. };
        let text: Vec<String> =
            [found(2, f64::NAN), found(4, f64::INFINITY), found(6, 3.), found(8, 4.)]
                .map(|found| serde_json::to_string(&found).unwrap() + "\n")
                .into();
        let (read, damaged) = parse(text.concat().as_bytes());
        assert!(damaged.is_empty());
        assert_eq!(read.iter().filter(|found| found.loss.is_nan()).count(), 2);
        assert_eq!(best(&read), Some(found(6, 3.)));
        assert_eq!(best(&read[..2]), None);
    }
}
