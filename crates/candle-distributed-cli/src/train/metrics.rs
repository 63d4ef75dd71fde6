//! The metrics of the steps of a run, one line of `metrics.jsonl` each, and sums and means over
//! them.

use std::{ops::Range, path::Path};

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

    /// How many steps are done after it.
    pub(crate) fn end(&self) -> u64 {
        self.step + 1
    }

    /// The number of bytes predicted: all but the first of each sequence.
    pub(crate) fn predictions(&self) -> u64 {
        self.real_tokens - self.sequences
    }

    /// Whether a step can have such numbers: there is one after it, and no sequence is empty.
    fn is_possible(&self) -> bool {
        self.step < u64::MAX && self.sequences <= self.real_tokens
    }
}

/// The steps of a run, in order.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    steps: Vec<StepMetrics>,
    /// The line of each step, from 0.
    places: Vec<usize>,
    /// The numbers of the damaged lines, from 1.
    damaged: Vec<u64>,
}

/// A step and how long it took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed {
    pub(crate) metrics: StepMetrics,
    pub(crate) seconds: f64,
    /// Whether a session other than the first starts with it.
    pub(crate) is_resumed: bool,
}

impl Metrics {
    /// The steps in a file; none if there is no file.
    ///
    /// Lines that are no steps, or whose step is not between those around it, are damaged. Only a
    /// last line without an end is as a run leaves it that is killed.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Ok(match input::read_if_there(path)? {
            Some(text) => Self::parse(&text),
            None => Self::default(),
        })
    }

    /// The steps in the content of a file.
    pub(crate) fn parse(text: &[u8]) -> Self {
        let is_cut = text.last().is_some_and(|&last| last != b'\n');
        let mut lines: Vec<&[u8]> = text.split(|&byte| byte == b'\n').collect();
        // What stands behind the last end of a line: nothing, or half a line.
        if let Some(last) = lines.pop().filter(|_| is_cut)
            && read_line(last).is_some()
        {
            lines.push(last);
        }
        let lines: Vec<Option<StepMetrics>> = lines.into_iter().map(read_line).collect();
        let mut metrics = Self::default();
        for (n, line) in lines.iter().enumerate() {
            let next = lines.get(n + 1).copied().flatten();
            match line.filter(|step| metrics.is_between(step, next)) {
                Some(step) => {
                    metrics.steps.push(step);
                    metrics.places.push(n);
                }
                None => metrics.damaged.push(n as u64 + 1),
            }
        }
        metrics
    }

    /// Whether a step comes after those so far, and before the next one, unless it is the next one
    /// that is out of place.
    fn is_between(&self, step: &StepMetrics, next: Option<StepMetrics>) -> bool {
        let done = self.done();
        let is_next_misplaced = next.is_some_and(|next| next.step < done);
        let is_before_next = next.is_none_or(|next| step.step < next.step);
        step.step >= done && (is_before_next || is_next_misplaced || step.step == done)
    }

    /// The lines of these steps, as they stand in the `text` that they were parsed from.
    pub(crate) fn lines(&self, text: &[u8]) -> Vec<u8> {
        let lines: Vec<&[u8]> = text.split(|&byte| byte == b'\n').collect();
        self.places.iter().flat_map(|&place| [lines[place], b"\n"].concat()).collect()
    }

    /// How many steps were done when the last of these was.
    pub(crate) fn done(&self) -> u64 {
        match self.steps.last() {
            None => 0,
            Some(last) => last.end(),
        }
    }

    /// The numbers of the damaged lines, from 1.
    pub(crate) fn damaged(&self) -> &[u64] {
        &self.damaged
    }

    /// Drops the steps from `end` on.
    pub(crate) fn truncate(&mut self, end: u64) {
        let n_kept = self.steps.partition_point(|step| step.step < end);
        self.steps.truncate(n_kept);
        self.places.truncate(n_kept);
    }

    /// The steps before `end` of which there are no metrics.
    pub(crate) fn missing(&self, end: u64) -> Vec<Range<u64>> {
        let starts = [0].into_iter().chain(self.steps.iter().map(StepMetrics::end));
        let ends = self.steps.iter().map(|step| step.step).chain([end]);
        starts.zip(ends).map(|(start, end)| start..end).filter(|gap| !gap.is_empty()).collect()
    }

    pub(crate) fn steps(&self) -> &[StepMetrics] {
        &self.steps
    }

    /// The steps with their times. Where the clock goes back, a new session starts.
    pub(crate) fn timed(&self) -> impl Iterator<Item = Timed> {
        let before = [0.0].into_iter().chain(self.steps.iter().map(|step| step.seconds));
        self.steps.iter().zip(before).map(|(&metrics, before)| {
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
        self.steps.iter().map(|step| u128::from(count(step))).sum()
    }

    /// The mean loss of the last `n_steps`.
    pub(crate) fn last_loss(&self, n_steps: usize) -> f64 {
        let mut mean = MeanLoss::default();
        self.steps.iter().rev().take(n_steps).for_each(|step| mean.add(step));
        mean.mean()
    }
}

fn read_line(line: &[u8]) -> Option<StepMetrics> {
    serde_json::from_slice(line).ok().filter(StepMetrics::is_possible)
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
pub(crate) mod tests {
    use std::fs;

    use super::*;

    pub(crate) fn line(step: u64, loss: &str, seconds: f64) -> String {
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

    fn steps(lines: &[String]) -> (Vec<u64>, Vec<u64>) {
        let metrics = Metrics::parse(lines.concat().as_bytes());
        (metrics.steps().iter().map(|step| step.step).collect(), metrics.damaged)
    }

    #[test]
    fn damaged_lines_are_counted_and_the_others_kept() {
        let lines: Vec<String> = (0..6).map(|step| line(step, "1", 1.0)).collect();
        assert_eq!(steps(&lines), ((0..6).collect(), vec![]));
        for (at, damage, kept, damaged) in [
            (2, "not a step\n", vec![0, 1, 3, 4, 5], vec![3]),
            (2, "\n", vec![0, 1, 3, 4, 5], vec![3]),
            (5, "{\"step\": 5, ", vec![0, 1, 2, 3, 4], vec![]),
            (5, "{\"step\": 5, \n", vec![0, 1, 2, 3, 4], vec![6]),
            (0, "\u{fffd}\n", vec![1, 2, 3, 4, 5], vec![1]),
        ] {
            let mut lines = lines.clone();
            lines[at] = damage.into();
            assert_eq!(steps(&lines), (kept, damaged), "{damage:?}");
        }
        // A step after which there can be none, and one of empty sequences.
        for damage in [
            line(u64::MAX, "1", 1.0),
            line(5, "1", 1.0).replace("\"sequences\": 1", "\"sequences\": 6"),
        ] {
            let mut lines = lines.clone();
            lines[5] = damage;
            assert_eq!(steps(&lines), ((0..5).collect(), vec![6]));
        }
        // A step of another place hides none of its neighbors.
        for (at, step, kept) in [(2, 9, [0, 1, 3, 4, 5]), (2, 0, [0, 1, 3, 4, 5])] {
            let mut lines = lines.clone();
            lines[at] = line(step, "1", 1.0);
            assert_eq!(steps(&lines), (kept.into(), vec![3]));
        }
        // The end of the last line alone is missing.
        let mut uncut = lines.concat();
        uncut.pop();
        assert_eq!(Metrics::parse(uncut.as_bytes()).done(), 6);
    }

    #[test]
    fn steps_without_metrics_are_found() {
        let lines: String = [1, 2, 5].map(|step| line(step, "1", 1.0)).concat();
        let mut metrics = Metrics::parse(lines.as_bytes());
        assert_eq!(metrics.missing(7), [0..1, 3..5, 6..7]);
        metrics.truncate(3);
        assert_eq!(metrics.done(), 3);
        assert_eq!(metrics.missing(3).first(), Some(&(0..1)));
        assert_eq!(Metrics::default().missing(0), []);
    }
}
