//! Runs the steps of a command one after the other, and prints a summary.

use std::{
    fmt,
    time::{Duration, Instant},
};

use crate::cmd::Result;

/// One line of the summary.
pub(crate) struct Step<'a, W> {
    pub(crate) name: &'a str,
    pub(crate) work: W,
}

/// The outcome of a step that did not fail.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Done {
    Passed,
    /// It did nothing, for this reason.
    Skipped(String),
}

/// Runs the steps up to the first that fails, and prints the outcome of each.
pub(crate) fn run_all<W>(steps: &[Step<'_, W>], run: impl Fn(&W) -> Result<Done>) -> Result {
    let mut outcomes = Vec::new();
    let mut result = Ok(());
    for step in steps {
        println!("\n== {}", step.name);
        let start = Instant::now();
        let outcome;
        (outcome, result) = match run(&step.work) {
            Ok(done) => (Outcome::Done(done, start.elapsed()), Ok(())),
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
    Done(Done, Duration),
    Failed(Duration),
    NotRun,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Done(Done::Passed, time) => write!(f, "passed  {:>6.1} s", time.as_secs_f64()),
            Outcome::Done(Done::Skipped(reason), _) => write!(f, "skipped, {reason}"),
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
    fn the_first_failure_ends_the_run() {
        let steps = [0, 1, 2, 3].map(|work| Step { name: "a step", work });
        let ran = Cell::new(0);
        let fails_at = |last| {
            ran.set(0);
            let step = |_: &i32| {
                if ran.replace(ran.get() + 1) == last {
                    Err("reason".into())
                } else {
                    Ok(Done::Passed)
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
    fn the_summary_says_why_a_step_was_skipped() {
        let outcome = |done| Outcome::Done(done, Duration::from_secs(2)).to_string();
        assert_eq!(outcome(Done::Passed), "passed     2.0 s");
        assert_eq!(outcome(Done::Skipped("no tool".into())), "skipped, no tool");
    }
}
