//! Runs the steps of a command in order, and prints a summary.

use std::{
    fmt,
    time::{Duration, Instant},
};

use crate::cmd::Result;

/// One line of the summary.
pub(crate) struct NamedStep<'a, W> {
    pub(crate) name: &'a str,
    pub(crate) work: W,
}

/// The outcome of a step that did not fail.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StepDone {
    Passed,
    /// It did nothing, for this reason.
    Skipped(String),
}

/// Runs the steps up to the first that fails, and prints the outcome of each.
pub(crate) fn run_all<W>(
    steps: &[NamedStep<'_, W>],
    run: impl Fn(&W) -> Result<StepDone>,
) -> Result {
    let mut outcomes = Vec::new();
    let mut result = Ok(());
    for step in steps {
        println!("\n== {}", step.name);
        let start = Instant::now();
        let outcome;
        (outcome, result) = match run(&step.work) {
            Ok(done) => (Outcome::StepDone(done, start.elapsed()), Ok(())),
            Err(error) => (Outcome::Failed(start.elapsed()), Err(error)),
        };
        println!("== {}: {outcome}", step.name);
        outcomes.push(outcome);
        if result.is_err() {
            break;
        }
    }
    outcomes.resize_with(steps.len(), || Outcome::NotRun);
    println!("\n== summary");
    steps
        .iter()
        .zip(&outcomes)
        .for_each(|(step, outcome)| println!("  {:<22} {outcome}", step.name));
    result
}

enum Outcome {
    StepDone(StepDone, Duration),
    Failed(Duration),
    NotRun,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::StepDone(StepDone::Passed, time) => {
                write!(f, "passed  {:>6.1} s", time.as_secs_f64())
            }
            Outcome::StepDone(StepDone::Skipped(reason), _) => write!(f, "skipped, {reason}"),
            Outcome::Failed(time) => write!(f, "FAILED  {:>6.1} s", time.as_secs_f64()),
            Outcome::NotRun => write!(f, "not run"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn first_failure_ends_the_run() {
        let steps = [0, 1, 2, 3].map(|work| NamedStep { name: "a step", work });
        let ran = Cell::new(0);
        let fails_at = |last| {
            ran.set(0);
            let step = |_: &i32| {
                if ran.replace(ran.get() + 1) == last {
                    Err("reason".into())
                } else {
                    Ok(StepDone::Passed)
                }
            };
            run_all(&steps, step).is_err()
        };
        assert!(fails_at(2));
        assert_eq!(ran.get(), 3);
        assert!(!fails_at(steps.len()));
        assert_eq!(ran.get(), steps.len());
    }

    #[test]
    fn summary_shows_skip_reasons() {
        let outcome = |done| Outcome::StepDone(done, Duration::from_secs(2)).to_string();
        assert_eq!(outcome(StepDone::Passed), "passed     2.0 s");
        assert_eq!(outcome(StepDone::Skipped("no tool".into())), "skipped, no tool");
    }
}
