//! The results of a run's validations.

use std::{io, path::Path};

use core_types::files as atomic;
use serde::{Deserialize, Deserializer, Serialize};

use crate::{
    error::{Error, Result},
    files,
    run::damage,
};

/// The file with the results of a run's validations, one per line.
pub(crate) const FILE: &str = "validation.jsonl";

/// The result of a validation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ValidationPoint {
    /// Number of steps before the validation.
    pub step: u64,
    /// Mean loss of all predictions. JSON stores a non-finite loss as null, which is read back as NaN.
    #[serde(deserialize_with = "nan_if_null")]
    pub loss: f64,
    /// Weight of the predictions: their number, if all have weight 1.
    pub predictions: f64,
}

impl ValidationPoint {
    /// Makes a result.
    pub fn new(step: u64, loss: f64, predictions: f64) -> Self {
        Self { step, loss, predictions }
    }
}

/// Reads a number; null is NaN, because JSON has no non-finite numbers.
fn nan_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Returns the result with the least finite loss.
pub fn best_validation(points: &[ValidationPoint]) -> Option<ValidationPoint> {
    let finite = points.iter().filter(|point| point.loss.is_finite());
    finite.min_by(|left, right| left.loss.total_cmp(&right.loss)).copied()
}

/// Drops the results after `steps` steps from the file of the run in `path`, since a resumed run
/// repeats those steps. A damaged file is backed up.
pub(super) fn keep_up_to(path: &Path, steps: u64) -> Result<()> {
    let path = path.join(FILE);
    let Some(text) = files::read_if_there(&path)? else { return Ok(()) };
    let (points, damaged) = parse(&text);
    damage::back_up_damaged(&path, &damaged)?;
    let mut lines = Vec::new();
    for point in points.iter().filter(|point| point.step <= steps) {
        let line = serde_json::to_vec(point).map_err(io::Error::from);
        lines.extend(line.map_err(|cause| Error::write(&path, cause))?);
        lines.push(b'\n');
    }
    atomic::write(&path, &lines).map_err(|cause| Error::write(&path, cause))
}

/// Returns the results of the run in `path` up to this number of steps. Damaged lines are skipped, with
/// a warning.
///
/// # Errors
///
/// [`Error::Io`] if the file cannot be read.
pub fn validations(path: &Path, steps: u64) -> Result<Vec<ValidationPoint>> {
    let path = path.join(FILE);
    let Some(text) = files::read_if_there(&path)? else { return Ok(Vec::new()) };
    let (mut points, damaged) = parse(&text);
    damage::warn_damaged(&path, &damaged);
    points.retain(|point| point.step <= steps);
    Ok(points)
}

/// Returns the results in a file, and the numbers of its damaged lines, from 1. A truncated last
/// line is not counted as damage, since a killed run leaves one.
fn parse(text: &[u8]) -> (Vec<ValidationPoint>, Vec<u64>) {
    let mut lines: Vec<&[u8]> = text.split(|&byte| byte == b'\n').collect();
    let last: Option<ValidationPoint> =
        lines.pop().and_then(|last| serde_json::from_slice(last).ok());
    let mut points = Vec::new();
    let mut damaged = Vec::new();
    for (number, line) in (1..).zip(lines) {
        match serde_json::from_slice(line) {
            Ok(point) => points.push(point),
            Err(_) => damaged.push(number),
        }
    }
    points.extend(last);
    (points, damaged)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn truncated_lines_drop_damage_is_backed_up() {
        let run = tempfile::tempdir().unwrap();
        let at = |name: &str| run.path().join(name);
        let line = |step| format!("{{\"step\":{step},\"loss\":1.5,\"predictions\":2.0}}\n");
        let file_after = |text: &str, steps| {
            fs::write(at(FILE), text).unwrap();
            keep_up_to(run.path(), steps).unwrap();
            fs::read_to_string(at(FILE)).unwrap()
        };
        let killed = line(4) + &line(8) + "{\"ste";
        assert_eq!(file_after(&killed, 8), line(4) + &line(8));
        assert_eq!(file_after(&killed, 4), line(4));
        assert!(!at("validation.damaged-0001.jsonl").exists());
        let damaged = line(4) + "damage\n" + &line(12);
        assert_eq!(file_after(&damaged, 12), line(4) + &line(12));
        assert_eq!(fs::read_to_string(at("validation.damaged-0001.jsonl")).unwrap(), damaged);
    }

    #[test]
    fn non_finite_loss_is_not_best() {
        let found = |step, loss| ValidationPoint { step, loss, predictions: 2. };
        let text: Vec<String> =
            [found(2, f64::NAN), found(4, f64::INFINITY), found(6, 3.), found(8, 4.)]
                .map(|found| serde_json::to_string(&found).unwrap() + "\n")
                .into();
        let (read, damaged) = parse(text.concat().as_bytes());
        assert!(damaged.is_empty());
        assert_eq!(read.iter().filter(|found| found.loss.is_nan()).count(), 2);
        assert_eq!(best_validation(&read), Some(found(6, 3.)));
        assert_eq!(best_validation(&read[..2]), None);
        assert_eq!(best_validation(&[found(4, f64::INFINITY)]), None);
    }
}
