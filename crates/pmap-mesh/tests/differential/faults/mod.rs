//! Replicas that do not do what the others do: a call ends, says one of the things that are true,
//! and the mesh lives on.

mod generate;
mod simulation;
mod tested;

use std::{collections::BTreeSet, fmt};

use candle_core::DType;
use pmap_mesh::DeviceMesh;

use crate::differential::{
    grid::{Axes, Grid},
    op::Op,
};

pub(crate) use self::generate::scenario;

/// What all replicas are to do, and who does something else.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    grid: Grid,
    steps: Vec<Step>,
    faults: Vec<Fault>,
    /// Slots that go on after an error.
    stubborn: Vec<usize>,
}

#[derive(Clone, Debug)]
enum Step {
    Call(Call),
    /// Starts a sum along these axes.
    Start(Axes),
    /// Waits for the sum that was started in the step of this number; does nothing if it was not.
    Wait(usize),
}

/// A collective of a tensor of ones.
#[derive(Clone, Debug)]
struct Call {
    op: Op,
    axes: Axes,
    dtype: DType,
    shape: Vec<usize>,
}

/// A slot does something else instead of step number `at`.
#[derive(Clone, Debug)]
struct Fault {
    slot: usize,
    at: usize,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Error,
    Panic,
    Return,
    /// Another collective, type, shape or other axes.
    Other(Call),
    Skip,
    /// The step is done twice; who starts twice waits for the first of the two only.
    Twice,
    NoSuchDim,
    NoSuchAxis,
    NoSuchRoot,
    /// A parallel function is called.
    Nested,
    /// The call comes from another thread of the replica, which is no fault.
    OtherThread,
    /// It comes from two threads at once.
    TwoThreads,
    /// It does not come before the call has ended.
    Late,
}

/// How a call may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Failure {
    /// The replica's own error, with a part of its text.
    Failed(usize, &'static str),
    Panicked(usize),
    UnknownAxis,
    /// Two replicas, the lower slot first.
    Mismatch(usize, usize),
    PeerReturned {
        slot: usize,
        waiting: usize,
    },
    Deadlock,
    /// A replica has not waited for what it had started.
    NeverAwaited(usize),
    Deadline,
}

/// What errors and panics of replicas say.
const NO_DATA: &str = "no more data";

/// How the call ends otherwise than it may.
pub(crate) fn check(scenario: &Scenario, mesh: &DeviceMesh) -> Result<(), String> {
    let found = tested::failure(scenario, mesh)?;
    let may_be = simulation::failures(scenario);
    let is_right = match found {
        None => may_be.is_empty(),
        Some(failure) => may_be.contains(&failure) || scenario.may_also_be(failure),
    };
    if !is_right {
        return Err(format!("it ends with {found:?}\nfor one of {may_be:?}"));
    }
    tested::works(mesh)
}

impl Scenario {
    pub(crate) fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Whether it needs a mesh with a deadline.
    pub(crate) fn is_late(&self) -> bool {
        self.faults.iter().any(|fault| matches!(fault.kind, Kind::Late))
    }

    fn fault(&self, slot: usize, at: usize) -> Option<&Kind> {
        let fault = self.faults.iter().find(|fault| fault.slot == slot && fault.at == at)?;
        Some(&fault.kind)
    }

    /// Whether it depends on time that this is found out.
    fn may_also_be(&self, failure: Failure) -> bool {
        match failure {
            // Two threads at once may also have come one after the other.
            Failure::Mismatch(left, right) => self.faults.iter().any(|fault| {
                matches!(fault.kind, Kind::TwoThreads) && [left, right] == [fault.slot; 2]
            }),
            // The deadline is short, and the machine may be busy.
            Failure::Deadline => self.is_late(),
            _ => false,
        }
    }

    /// The names of the kinds of failure with which the call may end.
    pub(crate) fn ends(&self) -> BTreeSet<String> {
        let failures = simulation::failures(self);
        if failures.is_empty() {
            return BTreeSet::from(["Ok".to_owned()]);
        }
        let name = |failure: &Failure| {
            let text = format!("{failure:?}");
            text.split(|c: char| !c.is_alphabetic()).next().unwrap().to_owned()
        };
        failures.iter().map(name).collect()
    }

    /// Whether some replicas start a sum that others do not.
    pub(crate) fn starts_differ(&self) -> bool {
        self.faults.iter().any(|fault| {
            matches!(self.steps[fault.at], Step::Start(_))
                && matches!(fault.kind, Kind::Skip | Kind::Twice | Kind::Other(_))
        })
    }
}

impl fmt::Display for Scenario {
    /// A line for each step and each fault.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { grid, steps, faults, stubborn } = self;
        write!(f, "mesh {:?}, stubborn: {stubborn:?}", grid.0)?;
        for (number, step) in steps.iter().enumerate() {
            write!(f, "\n{number}: {step:?}")?;
        }
        faults.iter().try_for_each(|fault| write!(f, "\n{fault:?}"))
    }
}
