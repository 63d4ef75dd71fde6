//! The metrics of the steps of a run, one line of `metrics.jsonl` each, and sums and means over
//! them.

use std::path::Path;

use candle_distributed::batch::Batch;
use serde::{Deserialize, Deserializer, Serialize};

use crate::{error::Result, input};

/// The metrics of one step.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct StepMetrics {
    pub(crate) step: u64,
    pub(crate) epoch: u64,
    /// Mean cross-entropy of the predictions of this step, in nats per byte.
    #[serde(deserialize_with = "number")]
    pub(crate) loss: f32,
    pub(crate) learning_rate: f64,
    pub(crate) sequences: u64,
    pub(crate) real_tokens: u64,
    pub(crate) padded_tokens: u64,
    /// Seconds from the start of the session's first step to the end of this one.
    pub(crate) seconds: f64,
}

/// A number; JSON writes `null` for NaN and the infinities.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f32::NAN))
}

impl StepMetrics {
    pub(crate) fn new(
        step: u64,
        epoch: u64,
        loss: f32,
        learning_rate: f64,
        batch: &Batch,
        seconds: f64,
    ) -> Self {
        Self {
            step,
            epoch,
            loss,
            learning_rate,
            sequences: batch.len() as u64,
            real_tokens: batch.real_tokens,
            padded_tokens: batch.padded_tokens(),
            seconds,
        }
    }

    /// The number of bytes predicted: all but the first of each sequence.
    pub(crate) fn predictions(&self) -> u64 {
        self.real_tokens.saturating_sub(self.sequences)
    }
}

/// The steps of a run, in order.
#[derive(Debug, Default)]
pub(crate) struct Metrics(Vec<StepMetrics>);

/// A step and how long it took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed {
    pub(crate) metrics: StepMetrics,
    pub(crate) seconds: f64,
    /// Whether a session other than the first starts with it.
    pub(crate) is_resumed: bool,
}

impl Metrics {
    /// The steps in a file; none if there is no file. A last line that was cut off is left out.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let Some(text) = input::read_if_there(path)? else { return Ok(Self::default()) };
        let text = String::from_utf8_lossy(&text);
        Ok(Self(text.lines().map_while(|line| serde_json::from_str(line).ok()).collect()))
    }

    pub(crate) fn steps(&self) -> &[StepMetrics] {
        &self.0
    }

    /// The steps with their times. Where the clock goes back, a new session starts.
    pub(crate) fn timed(&self) -> impl Iterator<Item = Timed> {
        let before = [0.0].into_iter().chain(self.0.iter().map(|step| step.seconds));
        self.0.iter().zip(before).map(|(&metrics, before)| {
            let is_resumed = metrics.seconds < before;
            let seconds = if is_resumed { metrics.seconds } else { metrics.seconds - before };
            Timed { metrics, seconds, is_resumed }
        })
    }

    /// The duration of all steps, without the time between sessions.
    pub(crate) fn seconds(&self) -> f64 {
        self.timed().map(|step| step.seconds).sum()
    }

    /// The sum over all steps of what `count` says of each.
    pub(crate) fn sum(&self, count: impl Fn(&StepMetrics) -> u64) -> u128 {
        self.0.iter().map(|step| u128::from(count(step))).sum()
    }

    /// The mean loss of the last `n_steps`.
    pub(crate) fn last_loss(&self, n_steps: usize) -> f64 {
        let mut mean = MeanLoss::default();
        self.0.iter().rev().take(n_steps).for_each(|step| mean.add(step));
        mean.mean()
    }
}

/// The mean loss of several steps, each weighted by the number of its predictions.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MeanLoss {
    sum: f64,
    predictions: u64,
}

impl MeanLoss {
    pub(crate) fn add(&mut self, step: &StepMetrics) {
        self.sum += f64::from(step.loss) * step.predictions() as f64;
        self.predictions += step.predictions();
    }

    pub(crate) fn mean(self) -> f64 {
        self.sum / self.predictions as f64
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn line(step: u64, loss: &str, seconds: f64) -> String {
        format!(
            "{{\"step\": {step}, \"epoch\": 0, \"loss\": {loss}, \"learning_rate\": 0.1, \
             \"sequences\": 1, \
             \"real_tokens\": 5, \"padded_tokens\": 8, \"seconds\": {seconds}}}\n"
        )
    }

    #[test]
    fn sessions_are_timed_one_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        assert!(Metrics::read(&path).unwrap().steps().is_empty());
        let lines =
            [line(0, "3", 1.0), line(1, "2", 1.5), line(2, "null", 0.25), line(3, "1", 0.75)]
                .concat();
        fs::write(&path, lines + "{\"step\": 4, ").unwrap();
        let metrics = Metrics::read(&path).unwrap();
        let timed: Vec<_> = metrics.timed().map(|step| (step.seconds, step.is_resumed)).collect();
        assert_eq!(timed, [(1.0, false), (0.5, false), (0.25, true), (0.5, false)]);
        assert!(metrics.steps()[2].loss.is_nan());
        assert_eq!(
            (metrics.seconds(), metrics.sum(|step| step.real_tokens), metrics.last_loss(1)),
            (2.25, 20, 1.0)
        );
    }
}
