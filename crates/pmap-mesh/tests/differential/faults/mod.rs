//! Replicas that deviate from the others. The call must end with an error that names the deviation,
//! and the mesh must work again afterwards.

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

/// The steps of all replicas, and the deviations.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    grid: Grid,
    steps: Vec<ScenarioStep>,
    faults: Vec<SlotFault>,
    /// The slots that go on after an error.
    stubborn: Vec<usize>,
}

#[derive(Clone, Debug)]
enum ScenarioStep {
    Call(CollectiveCall),
    /// Starts a sum along these axes.
    Start(Axes),
    /// Waits for the sum started in the step of this index; does nothing if none was started.
    Wait(usize),
}

/// A collective of a tensor of ones.
#[derive(Clone, Debug)]
struct CollectiveCall {
    op: Op,
    axes: Axes,
    dtype: DType,
    shape: Vec<usize>,
}

/// A deviation of one slot at the step with this index.
#[derive(Clone, Debug)]
struct SlotFault {
    slot: usize,
    index: usize,
    kind: FaultKind,
}

#[derive(Clone, Debug)]
enum FaultKind {
    Error,
    Panic,
    Return,
    /// Another collective, dtype, shape or other axes.
    Other(CollectiveCall),
    Skip,
    /// Runs the step twice; a replica that starts twice waits only for the first start.
    Twice,
    NoSuchDim,
    NoSuchAxis,
    NoSuchRoot,
    /// Calls a parallel function.
    Nested,
    /// Calls from another thread of the replica, which is allowed.
    WrongThread,
    /// Calls from two threads in parallel.
    TwoThreads,
    /// Arrives only after the end of the call.
    Late,
}

/// A possible end of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CallFailure {
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
    /// A replica has not waited for a collective that it started.
    NeverAwaited(usize),
    Deadline,
}

/// The text of errors and panics of replicas.
const NO_DATA: &str = "no more data";

/// Returns an error if the call ends in an unexpected way.
pub(crate) fn check(scenario: &Scenario, mesh: &DeviceMesh) -> Result<(), String> {
    let found = tested::failure(scenario, mesh)?;
    let possible = simulation::failures(scenario);
    let is_right = match found {
        None => possible.is_empty(),
        Some(failure) => possible.contains(&failure) || scenario.may_also_be(failure),
    };
    if !is_right {
        return Err(format!("the call ends with {found:?}\nfor one of {possible:?}"));
    }
    tested::works(mesh)
}

impl Scenario {
    pub(crate) fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Returns true if the scenario needs a mesh with a deadline.
    pub(crate) fn deadline_passed(&self) -> bool {
        self.faults.iter().any(|fault| matches!(fault.kind, FaultKind::Late))
    }

    fn fault(&self, slot: usize, index: usize) -> Option<&FaultKind> {
        let fault = self.faults.iter().find(|fault| fault.slot == slot && fault.index == index)?;
        Some(&fault.kind)
    }

    /// Returns true if timing decides whether this failure is detected.
    fn may_also_be(&self, failure: CallFailure) -> bool {
        match failure {
            // Two concurrent threads may have called one after the other.
            CallFailure::Mismatch(left, right) => self.faults.iter().any(|fault| {
                matches!(fault.kind, FaultKind::TwoThreads) && [left, right] == [fault.slot; 2]
            }),
            // The deadline is short, and the machine may be busy.
            CallFailure::Deadline => self.deadline_passed(),
            _ => false,
        }
    }

    /// Returns the names of the failures with which the call may end.
    pub(crate) fn ends(&self) -> BTreeSet<String> {
        let failures = simulation::failures(self);
        if failures.is_empty() {
            return BTreeSet::from(["Ok".to_owned()]);
        }
        failures
            .iter()
            .map(|failure| {
                let text = format!("{failure:?}");
                text.split(|c: char| !c.is_alphabetic()).next().unwrap().to_owned()
            })
            .collect()
    }

    /// Returns true if some replicas start a sum that others do not.
    pub(crate) fn starts_differ(&self) -> bool {
        self.faults.iter().any(|fault| {
            matches!(self.steps[fault.index], ScenarioStep::Start(_))
                && matches!(fault.kind, FaultKind::Skip | FaultKind::Twice | FaultKind::Other(_))
        })
    }
}

impl fmt::Display for Scenario {
    /// Writes a line for each step and each fault.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { grid, steps, faults, stubborn } = self;
        write!(f, "mesh {:?}, stubborn: {stubborn:?}", grid.0)?;
        for (number, step) in steps.iter().enumerate() {
            write!(f, "\n{number}: {step:?}")?;
        }
        faults.iter().try_for_each(|fault| write!(f, "\n{fault:?}"))
    }
}
