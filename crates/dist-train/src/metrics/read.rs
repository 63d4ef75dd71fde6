//! Reads the metrics of a run, with sums and means over steps.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Read, Write},
    ops::Range,
    path::Path,
};

use dist_checkpoint::files::AtomicFile;

use crate::{
    error::{AtPath, Result},
    metrics::StepMetrics,
};

/// The steps of a run in order, as recorded in a [log](crate::MetricsLog).
///
/// # Examples
///
/// ```
/// use dist_train::Metrics;
///
/// let line = |step: u64, seconds: f64| {
///     format!(
///         r#"{{"step":{step},"epoch":0,"loss":2.0,"learning_rate":0.1,"sequences":1,"#
///     ) + &format!(r#""real_tokens":50,"padded_tokens":64,"seconds":{seconds}}}"#) + "\n"
/// };
/// let text = line(0, 0.5) + &line(1, 1.0) + "half a line\n" + &line(2, 0.25);
/// let metrics = Metrics::read_lines(text.as_bytes())?;
/// assert_eq!((metrics.done(), metrics.damaged()), (3, &[3][..]));
/// let resumed: Vec<bool> = metrics.timed().map(|step| step.is_resumed).collect();
/// assert_eq!(resumed, [false, false, true]);
/// assert_eq!(metrics.timed().last().map(|step| step.seconds), Some(0.25));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    steps: Vec<StepMetrics>,
    /// The index of each step's line, from 0.
    line_indices: Vec<usize>,
    /// The line numbers of damaged lines, from 1.
    damaged: Vec<u64>,
}

/// A step with its duration.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct TimedStep {
    /// The metrics of the step.
    pub metrics: StepMetrics,
    /// The duration of the step alone; for the first step of a session, since the start of the
    /// session. ([`StepMetrics::seconds`] counts from the start of the session for every step.)
    pub seconds: f64,
    /// Whether the step is the first of a resumed session.
    pub is_resumed: bool,
}

impl Metrics {
    /// Reads the steps in a file.
    ///
    /// # Errors
    ///
    /// Returns [`CheckpointError::Io`](crate::CheckpointError::Io) if reading fails.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).at(path)?;
        Self::read_lines(BufReader::new(file)).at(path)
    }

    /// Reads the steps line by line, so that it needs memory for the steps only.
    ///
    /// A line is [damaged](Self::damaged) if it is not a step, or if its step number does not fit
    /// between its neighbors. A truncated last line is ignored instead, because a killed run may
    /// leave one. A line of more than 64 KiB counts as several damaged lines.
    ///
    /// # Errors
    ///
    /// An I/O error of `reader`.
    pub fn read_lines(mut reader: impl BufRead) -> io::Result<Self> {
        let mut metrics = Self::default();
        let mut line = Vec::new();
        // The previous line, which is judged once the next line is known.
        let mut pending: Option<ParsedLine> = None;
        let mut n_lines = 0;
        while read_line(&mut reader, &mut line)? {
            let step = parse_step(&line);
            if step.is_none() && is_cut(&line) {
                break;
            }
            if let Some(previous) = pending.replace(ParsedLine { step }) {
                metrics.add(n_lines - 1, previous.step, step);
            }
            n_lines += 1;
        }
        if let Some(last) = pending {
            metrics.add(n_lines - 1, last.step, None);
        }
        Ok(metrics)
    }

    /// Adds the step of a line, or counts the line as damaged. `next` is the step of the next line.
    fn add(&mut self, index: usize, step: Option<StepMetrics>, next: Option<StepMetrics>) {
        match step.filter(|step| self.is_in_order(step, next)) {
            Some(step) => {
                self.steps.push(step);
                self.line_indices.push(index);
            }
            None => self.damaged.push(index as u64 + 1),
        }
    }

    /// Returns true if a step is in order: not before `done()`, and before the next step. The next
    /// step does not count if it is itself out of order (below `done()`), or if this step is exactly
    /// `done()`.
    fn is_in_order(&self, step: &StepMetrics, next: Option<StepMetrics>) -> bool {
        let done = self.done();
        let is_next_misplaced = next.is_some_and(|next| next.step < done);
        let is_before_next = next.is_none_or(|next| step.step < next.step);
        step.step >= done && (is_before_next || is_next_misplaced || step.step == done)
    }

    /// Returns the steps.
    pub fn steps(&self) -> &[StepMetrics] {
        &self.steps
    }

    /// Returns the number of steps that the run had finished at the last recorded step.
    pub fn done(&self) -> u64 {
        match self.steps.last() {
            None => 0,
            Some(last) => last.n_done(),
        }
    }

    /// Returns the line numbers of damaged lines, from 1.
    pub fn damaged(&self) -> &[u64] {
        &self.damaged
    }

    /// Removes all lines but those of these steps from the file that they were read from. The kept
    /// lines do not change. The file is replaced atomically.
    ///
    /// # Errors
    ///
    /// An I/O error.
    pub fn rewrite(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        let reader = BufReader::new(File::open(path)?);
        let mut writer = BufWriter::new(AtomicFile::new(path)?);
        self.copy_lines(reader, &mut writer)?;
        writer.into_inner()?.persist()
    }

    fn copy_lines(&self, mut reader: impl BufRead, writer: &mut impl Write) -> io::Result<()> {
        let mut line = Vec::new();
        let mut n_read = 0;
        for &index in &self.line_indices {
            while n_read <= index && read_line(&mut reader, &mut line)? {
                n_read += 1;
            }
            writer.write_all(line.strip_suffix(b"\n").unwrap_or(&line))?;
            writer.write_all(b"\n")?;
        }
        Ok(())
    }

    /// Drops the steps from `end` on, which a run resumed at `end` repeats.
    pub fn truncate(&mut self, end: u64) {
        let n_kept = self.steps.partition_point(|step| step.step < end);
        self.steps.truncate(n_kept);
        self.line_indices.truncate(n_kept);
    }

    /// Returns the ranges of steps before `end` without metrics.
    pub fn missing(&self, end: u64) -> Vec<Range<u64>> {
        let starts = [0].into_iter().chain(self.steps.iter().map(StepMetrics::n_done));
        let ends = self.steps.iter().map(|step| step.step).chain([end]);
        starts.zip(ends).map(|(start, end)| start..end).filter(|gap| !gap.is_empty()).collect()
    }

    /// Iterates over the steps with their durations. A new session starts at each step where the
    /// clock goes back.
    pub fn timed(&self) -> impl Iterator<Item = TimedStep> {
        let before = [0.0].into_iter().chain(self.steps.iter().map(|step| step.seconds));
        self.steps.iter().zip(before).map(|(&metrics, before)| {
            let is_resumed = metrics.seconds < before;
            let seconds = if is_resumed { metrics.seconds } else { metrics.seconds - before };
            TimedStep { metrics, seconds, is_resumed }
        })
    }

    /// Adds up `count` over all steps.
    pub fn sum(&self, count: impl Fn(&StepMetrics) -> u64) -> u128 {
        self.steps.iter().map(|step| u128::from(count(step))).sum()
    }
}

/// A line of the file, which may be damaged.
struct ParsedLine {
    /// The step, if the line is one.
    step: Option<StepMetrics>,
}

/// The length limit of a line. The longest line of a step has about 300 bytes.
const MAX_LINE_BYTES: u64 = 1 << 16;

/// Reads a line with its end, or its next part if it is too long. Returns false at the end of the
/// file.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    Ok(reader.take(MAX_LINE_BYTES).read_until(b'\n', line)? > 0)
}

/// Returns true if the file ends before the line does.
fn is_cut(line: &[u8]) -> bool {
    !line.ends_with(b"\n") && (line.len() as u64) < MAX_LINE_BYTES
}

/// Parses a line; `None` if it is not a plausible step.
fn parse_step(line: &[u8]) -> Option<StepMetrics> {
    serde_json::from_slice(line).ok().filter(StepMetrics::is_possible)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line exactly as `candle-distributed train` writes it.
    const LINE: &str = r#"{"step":7,"epoch":1,"loss":2.1,"learning_rate":0.003,"sequences":12,"real_tokens":3000,"padded_tokens":3072,"seconds":1.25}"#;

    fn line(step: u64, loss: &str, seconds: f64) -> String {
        format!(
            "{{\"step\": {step}, \"epoch\": 0, \"loss\": {loss}, \"learning_rate\": 0.1, \
             \"sequences\": 1, \
             \"real_tokens\": 5, \"padded_tokens\": 8, \"seconds\": {seconds}}}\n"
        )
    }

    fn parse(text: &[u8]) -> Metrics {
        Metrics::read_lines(text).unwrap()
    }

    #[test]
    fn lines_round_trip() {
        let all = LINE.replace('}', r#","grad_norm":0.5,"weight":12.0,"peak_bytes":4096}"#);
        let few = r#"{"step":7,"loss":2.1,"seconds":1.25}"#;
        for line in [LINE, few, &all, &LINE.replace("2.1", "null")] {
            let metrics = parse(line.as_bytes());
            assert_eq!(serde_json::to_string(&metrics.steps()[0]).unwrap(), *line);
        }
        let known = parse(LINE.replace('}', r#","later":[1]}"#).as_bytes());
        assert_eq!(known.steps(), parse(LINE.as_bytes()).steps());
        let said = parse(all.as_bytes());
        let weights = (known.steps()[0].loss_weight(), said.steps()[0].loss_weight());
        assert_eq!(weights, (2988.0, 12.0));
    }

    #[test]
    fn sessions_are_timed_separately() {
        let lines =
            [line(0, "3", 1.0), line(1, "2", 1.5), line(2, "null", 0.25), line(3, "1", 0.75)];
        let metrics = parse((lines.concat() + "{\"step\": 4, ").as_bytes());
        let timed: Vec<_> = metrics.timed().map(|step| (step.seconds, step.is_resumed)).collect();
        assert_eq!(timed, [(1.0, false), (0.5, false), (0.25, true), (0.5, false)]);
        assert!(metrics.steps()[2].loss.is_nan());
        assert_eq!(
            (timed.iter().map(|(seconds, _)| seconds).sum(), metrics.sum(|step| step.real_tokens)),
            (2.25, 20)
        );
    }

    #[test]
    fn kept_lines_are_copied_unchanged() {
        let lines: Vec<String> = (0..4).map(|step| line(step, "1", 1.0)).collect();
        let long = "x".repeat(150_000) + "\n";
        let text = [&lines[0], &long, &lines[1], "\n", &lines[2], lines[3].trim_end()].concat();
        let mut metrics = parse(text.as_bytes());
        assert_eq!((metrics.done(), metrics.damaged()), (4, &[2, 3, 4, 6][..]));
        for n_kept in [4, 3, 0] {
            metrics.truncate(n_kept);
            let mut copied = Vec::new();
            metrics.copy_lines(text.as_bytes(), &mut copied).unwrap();
            let kept = lines[..usize::try_from(n_kept).unwrap()].concat();
            assert_eq!(String::from_utf8(copied).unwrap(), kept);
        }
    }

    fn steps(lines: &[String]) -> (Vec<u64>, Vec<u64>) {
        let metrics = parse(lines.concat().as_bytes());
        (metrics.steps().iter().map(|step| step.step).collect(), metrics.damaged)
    }

    #[test]
    fn damaged_lines_are_reported_and_skipped() {
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
        // A step without a successor, and a step with empty sequences.
        for damage in [
            line(u64::MAX, "1", 1.0),
            line(5, "1", 1.0).replace("\"sequences\": 1", "\"sequences\": 6"),
        ] {
            let mut lines = lines.clone();
            lines[5] = damage;
            assert_eq!(steps(&lines), ((0..5).collect(), vec![6]));
        }
        // A misplaced step does not hide its neighbors.
        for (at, step, kept) in [(2, 9, [0, 1, 3, 4, 5]), (2, 0, [0, 1, 3, 4, 5])] {
            let mut lines = lines.clone();
            lines[at] = line(step, "1", 1.0);
            assert_eq!(steps(&lines), (kept.into(), vec![3]));
        }
        // Only the newline of the last line is missing.
        let mut uncut = lines.concat();
        uncut.pop();
        assert_eq!(parse(uncut.as_bytes()).done(), 6);
    }

    #[test]
    fn missing_steps_are_found() {
        let lines: String = [1, 2, 5].map(|step| line(step, "1", 1.0)).concat();
        let mut metrics = parse(lines.as_bytes());
        assert_eq!(metrics.missing(7), [0..1, 3..5, 6..7]);
        metrics.truncate(3);
        assert_eq!(metrics.done(), 3);
        assert_eq!(metrics.missing(3).first(), Some(&(0..1)));
        assert_eq!(Metrics::default().missing(0), []);
    }
}
