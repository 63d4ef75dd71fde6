//! The output of a run for people: progress bar, progress lines, summary and curve.

use std::path::PathBuf;

use candle_distributed::{
    batch::{Batch, PaddingReport},
    finetune::{
        Event, Trainer,
        cost::ModelBytes,
        run::{ValidationPoint, metrics, validations},
        spec::Session,
    },
    train::{GradientReport, MeanLoss, StepMetrics},
};
use indicatif::ProgressBar;

use crate::{
    error::Result,
    output,
    train::{comparison::PeakMemory, curve},
};

/// The number of progress lines that a run prints.
const N_LINES: u64 = 10;

/// The file of the drawing of a run.
const CURVE: &str = "loss.svg";

/// Shows the events of a run.
#[derive(Debug)]
pub(crate) struct Journal {
    /// The folder of the run.
    path: PathBuf,
    model_bytes: ModelBytes,
    bar: ProgressBar,
    steps: u64,
    padding: PaddingReport,
    /// The first step of this session, and its loss.
    first: Option<(u64, f32)>,
    /// The mean loss since the last progress line.
    recent: MeanLoss,
    seconds: f64,
}

impl Journal {
    /// Makes the journal of a run. It draws a progress bar if stderr is a terminal.
    pub(crate) fn new(trainer: &Trainer) -> Result<Self> {
        let run = trainer.run();
        let steps = run.spec.steps;
        let bar = output::progress(steps, "{bar:30} step {pos}/{len}, {msg}, {eta} left")
            .with_position(run.first_step());
        Ok(Self {
            path: trainer.path().to_owned(),
            model_bytes: run.plan()?.bytes,
            bar,
            steps,
            padding: PaddingReport::default(),
            first: None,
            recent: MeanLoss::default(),
            seconds: 0.0,
        })
    }

    /// Prints the result of a gradient check.
    pub(crate) fn show_gradients(&self, report: &GradientReport) {
        self.bar.suspend(|| {
            output::message(|out| {
                write!(
                    out,
                    "slope of the loss by the gradients (found) and by finite differences \
                     (expected):\n{report}"
                )
            });
        });
    }

    /// Shows an event.
    pub(crate) fn log(&mut self, event: &Event) {
        match event {
            Event::Step { metrics, batches } => self.log_step(metrics, batches),
            Event::Validated { point, is_best } => self.log_validation(point, *is_best),
            Event::Stopped { .. } => self.draw_or_warn(),
            _ => {}
        }
    }

    fn log_step(&mut self, step: &StepMetrics, batches: &[Batch]) {
        self.padding.extend(batches);
        self.first.get_or_insert((step.step, step.loss));
        // A line was printed after the previous step: begin a new mean. (Not when it is printed,
        // because `finish` shows the last mean.)
        if self.prints_line_after(step.step) {
            self.recent = MeanLoss::default();
        }
        self.recent.add(step);
        self.seconds = step.seconds;
        let status =
            format!("loss {:.3}, {:.0} tokens/s", self.recent.mean(), self.tokens_per_second());
        self.bar.set_message(status.clone());
        self.bar.inc(1);
        if self.prints_line_after(step.step + 1) {
            let epoch = step.epoch.map_or(String::new(), |epoch| format!("epoch {epoch}, "));
            let line = format!("step {} of {}, {epoch}{status}", step.step + 1, self.steps);
            self.bar.suspend(|| output::message(|out| writeln!(out, "{line}")));
        }
    }

    fn log_validation(&self, point: &ValidationPoint, is_best: bool) {
        let ValidationPoint { step, loss, .. } = point;
        let note = if is_best { ", the lowest so far" } else { "" };
        let line = format!("validation after step {step}: loss {loss:.3}{note}");
        self.bar.suspend(|| output::message(|out| writeln!(out, "{line}")));
    }

    /// Returns true if a progress line is printed after this many steps.
    fn prints_line_after(&self, n_done: u64) -> bool {
        n_done == self.steps || n_done.is_multiple_of(self.steps.div_ceil(N_LINES))
    }

    /// Draws the curve and prints a summary of the run. Call it after the model is saved.
    pub(crate) fn finish(&mut self, session: Option<&Session>) -> Result<()> {
        self.draw()?;
        self.bar.finish_and_clear();
        let recent = self.recent.mean();
        let memory = session.and_then(|session| PeakMemory::new(session, self.model_bytes));
        output::to_stdout(|out| {
            if let Some((step, loss)) = self.first {
                let number = step + 1;
                writeln!(
                    out,
                    "loss {loss:.3} at step {number}, {recent:.3} over the last steps, in {:.1} s",
                    self.seconds
                )?;
            }
            writeln!(out, "{}", self.padding)?;
            if let Some(memory) = memory {
                writeln!(out, "{memory}")?;
            }
            writeln!(out, "metrics and model are in {}", self.path.display())
        })
    }

    /// Writes the curve of a run that ends early. A fault is only a warning: it must not hide the
    /// reason for the end.
    pub(crate) fn draw_or_warn(&self) {
        if let Err(error) = self.draw() {
            output::warning(format_args!("cannot draw {CURVE}: {}", error.chain()));
        }
    }

    /// Writes the curve of the run so far.
    fn draw(&self) -> Result<()> {
        let curve = curve::draw(&metrics(&self.path)?, &validations(&self.path, self.steps)?)?;
        output::file(&self.path.join(CURVE), curve.as_bytes())
    }

    fn tokens_per_second(&self) -> f64 {
        self.padding.real_tokens as f64 / self.seconds
    }
}
