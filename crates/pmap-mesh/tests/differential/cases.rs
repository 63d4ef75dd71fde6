//! Cases from consecutive seeds, with a time limit for each.

#![allow(clippy::print_stderr, reason = "the case is printed before its panic resumes")]

use std::{
    env,
    fmt::Display,
    ops::Range,
    panic::resume_unwind,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use crate::differential::random::Random;

/// The time limit of a case. A case takes milliseconds; the rest is for busy machines.
const LIMIT: Duration = Duration::from_mins(1);

/// A test whose cases are made from consecutive seeds.
pub(crate) struct SeededCases<C> {
    /// The arguments of `cargo test` that select this test.
    arguments: &'static str,
    make: Arc<CaseMaker<C>>,
}

type CaseMaker<C> = dyn Fn(&mut Random) -> C + Send + Sync;

impl<C: Display + 'static> SeededCases<C> {
    pub(crate) fn new(
        arguments: &'static str,
        make: impl Fn(&mut Random) -> C + Send + Sync + 'static,
    ) -> Self {
        Self { arguments, make: Arc::new(make) }
    }

    /// Runs `usual` cases, or `DIFFERENTIAL_CASES` if set, starting with the seed in
    /// `DIFFERENTIAL_SEED`.
    ///
    /// `checker` makes the function that checks a case, on the thread that runs them.
    pub(crate) fn run<F>(&self, usual: u64, checker: impl FnOnce() -> F + Send + 'static)
    where
        F: FnMut(&C) -> Result<(), String>,
    {
        let Range { start: first, end } = seeds(usual);
        let make = Arc::clone(&self.make);
        let (sender, outcomes) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut check = checker();
            for case in first..end {
                // After a failure there is no receiver.
                if sender.send(check(&make(&mut Random::new(case)))).is_err() {
                    return;
                }
            }
        });
        for case in first..end {
            match outcomes.recv_timeout(LIMIT) {
                Ok(Ok(())) => {}
                Ok(Err(failure)) => panic!("{failure}\n{}", self.describe(case)),
                Err(RecvTimeoutError::Timeout) => {
                    panic!("the case has not ended after {LIMIT:?}\n{}", self.describe(case))
                }
                Err(RecvTimeoutError::Disconnected) => {
                    eprintln!("{}", self.describe(case));
                    resume_unwind(thread.join().unwrap_err())
                }
            }
        }
        // The meshes are dropped before the sender.
        let end = outcomes.recv_timeout(LIMIT);
        assert_eq!(end, Err(RecvTimeoutError::Disconnected), "the meshes end with the cases");
        thread.join().unwrap();
    }

    /// Describes the case of this seed and the command that runs only this case.
    fn describe(&self, seed: u64) -> String {
        let case = (self.make)(&mut Random::new(seed));
        let arguments = self.arguments;
        format!(
            "case {seed}: {case}\nalone: DIFFERENTIAL_SEED={seed} DIFFERENTIAL_CASES=1 cargo test -p \
             pmap-mesh {arguments}"
        )
    }
}

/// Returns the seeds of `usual` cases, or the seeds in the environment.
pub(crate) fn seeds(usual: u64) -> Range<u64> {
    let first = variable("DIFFERENTIAL_SEED").unwrap_or(0);
    first..first + variable("DIFFERENTIAL_CASES").unwrap_or(usual)
}

/// Returns the number in an environment variable, if it is set.
fn variable(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}
