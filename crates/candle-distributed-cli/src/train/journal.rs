//! What people and programs see of a run: progress bar, metrics, summary.

use candle_distributed::batch::{Batch, PaddingReport};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::{
    error::Result,
    output,
    train::{parameters::Parameters, run_dir::RunDir},
};

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
    /// Seconds from the begin of the first step to the end of this one.
    seconds: f64,
}

impl StepMetrics {
    pub(crate) fn new(step: u64, epoch: u64, loss: f32, learning_rate: f64, batch: &Batch, seconds: f64) -> Self {
        let (sequences, real_tokens, padded_tokens) = (batch.len() as u64, batch.real_tokens, batch.padded_tokens());
        Self { step, epoch, loss, learning_rate, sequences, real_tokens, padded_tokens, seconds }
    }
}

/// How many lines a run prints on its way.
const LINES: usize = 10;

/// Keeps the record of a run.
#[derive(Debug)]
pub(crate) struct Journal {
    run_dir: RunDir,
    bar: ProgressBar,
    steps: u64,
    padding: PaddingReport,
    /// The loss of every step so far.
    losses: Vec<f32>,
    seconds: f64,
}

impl Journal {
    /// A journal of `steps` steps in `run_dir`; it draws a progress bar if stderr is a terminal.
    pub(crate) fn new(steps: u64, run_dir: RunDir) -> Self {
        let style = ProgressStyle::with_template("{bar:30} step {pos}/{len}, {msg}, {eta} left");
        let bar = ProgressBar::new(steps).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { run_dir, bar, steps, padding: PaddingReport::default(), losses: Vec::new(), seconds: 0.0 }
    }

    /// Records one more step, made of `batch`.
    pub(crate) fn log(&mut self, step: &StepMetrics, batch: &Batch) -> Result<()> {
        self.run_dir.append(step)?;
        self.padding.add(batch);
        self.losses.push(step.loss);
        self.seconds = step.seconds;
        let status = format!("loss {:.3}, {:.0} tokens/s", step.loss, self.tokens_per_second());
        self.bar.set_message(status.clone());
        self.bar.inc(1);
        let done = step.step + 1;
        if done.is_multiple_of(self.steps.div_ceil(LINES as u64)) {
            self.print(&format!("step {done} of {}, epoch {}, {status}", self.steps, step.epoch))?;
        }
        Ok(())
    }

    /// Saves the parameters and prints what became of the run.
    pub(crate) fn finish(&self, parameters: &Parameters) -> Result<()> {
        self.run_dir.save(parameters)?;
        self.bar.finish_and_clear();
        let last = &self.losses[self.losses.len().saturating_sub(LINES)..];
        let (first, last) =
            (self.losses.first().copied().unwrap_or(f32::NAN), last.iter().sum::<f32>() / last.len() as f32);
        self.print(&format!(
            "loss {first:.3} at the first step, {last:.3} over the last ones, in {:.1} s",
            self.seconds
        ))?;
        self.print(&self.padding.to_string())?;
        self.print(&format!("metrics and checkpoint are in {}", self.run_dir.path().display()))
    }

    /// Prints a line without tearing the progress bar.
    fn print(&self, line: &str) -> Result<()> {
        self.bar.suspend(|| output::text(|out| writeln!(out, "{line}")))
    }

    fn tokens_per_second(&self) -> f64 {
        self.padding.real_tokens as f64 / self.seconds
    }
}
