//! What people and programs see of a run: progress bar, metrics, summary.

use candle_distributed::batch::{Batch, PaddingReport};
use candle_nn::VarMap;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::{error::Result, output, train::run_dir::RunDir};

/// What is known of one step; one line of `metrics.jsonl`.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct StepMetrics {
    step: u64,
    epoch: u64,
    /// Mean cross-entropy of the predictions of this step, in nats a byte.
    loss: f32,
    learning_rate: f64,
    sequences: u64,
    real_tokens: u64,
    padded_tokens: u64,
    /// Seconds from the begin of the session's first step to the end of this one.
    seconds: f64,
}

impl StepMetrics {
    pub(crate) fn new(step: u64, epoch: u64, loss: f32, learning_rate: f64, batch: &Batch, seconds: f64) -> Self {
        let (sequences, real_tokens, padded_tokens) = (batch.len() as u64, batch.real_tokens, batch.padded_tokens());
        Self { step, epoch, loss, learning_rate, sequences, real_tokens, padded_tokens, seconds }
    }
}

/// How many lines a run prints on its way.
const LINES: u64 = 10;

/// Keeps the record of a run.
#[derive(Debug)]
pub(crate) struct Journal {
    run_dir: RunDir,
    bar: ProgressBar,
    steps: u64,
    padding: PaddingReport,
    /// The first step of this session, and its loss.
    first: Option<(u64, f32)>,
    /// The loss since the last line printed.
    recent: MeanLoss,
    seconds: f64,
}

impl Journal {
    /// A journal of the steps from `first` up to `steps` in `run_dir`; it draws a progress bar if stderr is a terminal.
    pub(crate) fn new(first: u64, steps: u64, run_dir: RunDir) -> Self {
        let style = ProgressStyle::with_template("{bar:30} step {pos}/{len}, {msg}, {eta} left");
        let bar = ProgressBar::new(steps)
            .with_position(first)
            .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let (padding, recent) = (PaddingReport::default(), MeanLoss::default());
        Self { run_dir, bar, steps, padding, first: None, recent, seconds: 0.0 }
    }

    /// Records one more step, made of `batch`.
    pub(crate) fn log(&mut self, step: &StepMetrics, batch: &Batch) -> Result<()> {
        self.run_dir.append(step)?;
        self.padding.add(batch);
        self.first.get_or_insert((step.step, step.loss));
        if self.is_line(step.step) {
            self.recent = MeanLoss::default();
        }
        self.recent.add(step.loss, step.real_tokens - step.sequences);
        self.seconds = step.seconds;
        let status = format!("loss {:.3}, {:.0} tokens/s", self.recent.mean(), self.tokens_per_second());
        self.bar.set_message(status.clone());
        self.bar.inc(1);
        if self.is_line(step.step + 1) {
            let line = format!("step {} of {}, epoch {}, {status}", step.step + 1, self.steps, step.epoch);
            self.bar.suspend(|| output::message(|out| writeln!(out, "{line}")));
        }
        Ok(())
    }

    /// Whether a line is printed after this many steps.
    fn is_line(&self, done: u64) -> bool {
        done == self.steps || done.is_multiple_of(self.steps.div_ceil(LINES))
    }

    /// Saves the parameters and prints what became of the run.
    pub(crate) fn finish(&self, vars: &VarMap) -> Result<()> {
        self.run_dir.save(vars)?;
        self.bar.finish_and_clear();
        let last = self.recent.mean();
        output::text(|out| {
            if let Some((step, loss)) = self.first {
                let number = step + 1;
                writeln!(
                    out,
                    "loss {loss:.3} at step {number}, {last:.3} over the last ones, in {:.1} s",
                    self.seconds
                )?;
            }
            writeln!(out, "{}", self.padding)?;
            writeln!(out, "metrics and model are in {}", self.run_dir.path().display())
        })
    }

    fn tokens_per_second(&self) -> f64 {
        self.padding.real_tokens as f64 / self.seconds
    }
}

/// The mean loss of several steps, each weighted by the number of its predictions.
#[derive(Clone, Copy, Debug, Default)]
struct MeanLoss {
    sum: f64,
    predictions: u64,
}

impl MeanLoss {
    fn add(&mut self, loss: f32, predictions: u64) {
        self.sum += f64::from(loss) * predictions as f64;
        self.predictions += predictions;
    }

    fn mean(self) -> f64 {
        self.sum / self.predictions as f64
    }
}
