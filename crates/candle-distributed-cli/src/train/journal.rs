//! What a run shows to people and programs: progress bar, metrics, summary.

use candle_distributed::{
    batch::{Batch, PaddingReport},
    finetune::{
        cost::{ModelBytes, StepTraffic},
        run::{RunFolder, ValidationPoint, metrics, validations},
    },
    train::{GradientReport, MeanLoss, StepMetrics},
    types::files::AtomicFolder,
};
use indicatif::ProgressBar;

use crate::{
    error::Result,
    output,
    train::{curve, measured::PeakMemory},
};

/// The number of progress lines that a run prints.
const LINES: u64 = 10;

/// The file of the drawing of a run.
const CURVE: &str = "loss.svg";

/// Keeps the record of a run.
#[derive(Debug)]
pub(crate) struct Journal {
    run: RunFolder,
    /// What the model needs.
    needs: ModelBytes,
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
    /// A journal of the steps from `first` up to `steps` in `run`; it draws a progress bar if
    /// stderr is a terminal.
    pub(crate) fn new(first: u64, steps: u64, run: RunFolder, needs: ModelBytes) -> Self {
        let bar = output::progress(steps, "{bar:30} step {pos}/{len}, {msg}, {eta} left")
            .with_position(first);
        Self {
            run,
            needs,
            bar,
            steps,
            padding: PaddingReport::default(),
            first: None,
            recent: MeanLoss::default(),
            seconds: 0.0,
        }
    }

    /// Prints what a check of the gradients has found.
    pub(crate) fn show(&self, checked: &GradientReport) {
        self.bar.suspend(|| {
            output::message(|out| {
                write!(
                    out,
                    "how fast the loss changes by the gradient (found) and by its differences \
                     (expected):\n{checked}"
                )
            });
        });
    }

    /// Records one more step, made of these batches.
    pub(crate) fn log(&mut self, step: &StepMetrics, batches: &[Batch]) -> Result<()> {
        self.run.append(step)?;
        self.padding.extend(batches);
        self.first.get_or_insert((step.step, step.loss));
        if self.is_line(step.step) {
            self.recent = MeanLoss::default();
        }
        self.recent.add(step);
        self.seconds = step.seconds;
        let status =
            format!("loss {:.3}, {:.0} tokens/s", self.recent.mean(), self.tokens_per_second());
        self.bar.set_message(status.clone());
        self.bar.inc(1);
        if self.is_line(step.step + 1) {
            let line =
                format!("step {} of {}, epoch {}, {status}", step.step + 1, self.steps, step.epoch);
            self.bar.suspend(|| output::message(|out| writeln!(out, "{line}")));
        }
        Ok(())
    }

    /// Records what a validation has found, and whether it is the best so far.
    pub(crate) fn log_validation(&mut self, found: ValidationPoint, is_best: bool) -> Result<()> {
        self.run.append_validation(found)?;
        let ValidationPoint { step, loss, .. } = found;
        let best = if is_best { ", the least so far" } else { "" };
        let line = format!("validation after step {step}: loss {loss:.3}{best}");
        self.bar.suspend(|| output::message(|out| writeln!(out, "{line}")));
        Ok(())
    }

    /// Remembers what the first device handed over in a step.
    pub(crate) fn set_step_traffic(&mut self, traffic: StepTraffic) {
        self.run.set_step_traffic(traffic);
    }

    /// Whether a line is printed after this many steps.
    fn is_line(&self, done: u64) -> bool {
        done == self.steps || done.is_multiple_of(self.steps.div_ceil(LINES))
    }

    /// Gives the folder of the model, which is written, its name.
    pub(crate) fn save(&mut self, partial: AtomicFolder) -> Result<()> {
        Ok(self.run.save(partial)?)
    }

    /// Prints a summary of the run, whose model is saved.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.pause()?;
        self.bar.finish_and_clear();
        let last = self.recent.mean();
        let memory = PeakMemory::new(self.run.session(), self.needs);
        output::text(|out| {
            if let Some((step, loss)) = self.first {
                let number = step + 1;
                writeln!(
                    out,
                    "loss {loss:.3} at step {number}, {last:.3} over the last steps, in {:.1} s",
                    self.seconds
                )?;
            }
            writeln!(out, "{}", self.padding)?;
            if let Some(memory) = memory {
                writeln!(out, "{memory}")?;
            }
            writeln!(out, "metrics and model are in {}", self.run.path().display())
        })
    }

    /// Syncs what was logged to disk.
    pub(crate) fn sync(&self) -> Result<()> {
        Ok(self.run.sync()?)
    }

    /// Saves with the run what is known about this session, and draws how the run went so far.
    pub(crate) fn pause(&mut self) -> Result<()> {
        self.run.end_session()?;
        let path = self.run.path();
        let curve = curve::draw(&metrics(path)?, &validations(path, self.steps)?)?;
        output::file(&path.join(CURVE), curve.as_bytes())
    }

    fn tokens_per_second(&self) -> f64 {
        self.padding.real_tokens as f64 / self.seconds
    }
}
