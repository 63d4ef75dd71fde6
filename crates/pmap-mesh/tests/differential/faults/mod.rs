//! Replicas that do not do what the others do: a call ends, says one of the things that are true,
//! and the mesh lives on.

mod generate;
mod simulation;
mod tested;

use std::fmt;

use candle_core::DType;
use pmap_mesh::DeviceMesh;

use crate::{
    grid::{Axes, Grid},
    op::Op,
};

pub(crate) use self::generate::scenario;

/// What all replicas are to call, and who does something else.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    grid: Grid,
    /// Axes of a sum that all start before the calls and wait for after them.
    under_way: Option<Axes>,
    calls: Vec<Call>,
    faults: Vec<Fault>,
    /// Slots that go on after an error.
    stubborn: Vec<usize>,
}

/// A collective of a tensor of ones.
#[derive(Clone, Debug)]
struct Call {
    op: Op,
    axes: Axes,
    dtype: DType,
    shape: Vec<usize>,
}

/// A slot does something else instead of call number `at`.
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
}

/// How a call may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// The replica's own error, with a part of its text.
    Failed(usize, &'static str),
    Panicked(usize),
    UnknownAxis,
    /// Two replicas, the lower slot first.
    Mismatch(usize, usize),
    Deserted {
        slot: usize,
        waiting: usize,
    },
    Deadlock,
    /// A replica has not waited for what it had started.
    NotWaited(usize),
}

/// What errors and panics of replicas say.
const NO_DATA: &str = "no more data";

/// How the call ends otherwise than it may.
pub(crate) fn check(scenario: &Scenario, mesh: &DeviceMesh) -> Result<(), String> {
    let found = tested::failure(scenario, mesh)?;
    let may_be = simulation::failures(scenario);
    // Two threads at once may be found out, or have come one after the other.
    let mut two_threads = scenario.faults.iter().filter_map(|fault| match fault.kind {
        Kind::TwoThreads => Some(Failure::Mismatch(fault.slot, fault.slot)),
        _ => None,
    });
    let is_right = match found {
        None => may_be.is_empty(),
        Some(failure) => may_be.contains(&failure) || two_threads.any(|of| of == failure),
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

    /// The names of the kinds of failure with which the call may end.
    pub(crate) fn ends(&self) -> Vec<String> {
        let failures = simulation::failures(self);
        if failures.is_empty() {
            return vec!["Ok".to_owned()];
        }
        let name = |failure: &Failure| {
            let text = format!("{failure:?}");
            text.split(|c: char| !c.is_alphabetic()).next().unwrap().to_owned()
        };
        failures.iter().map(name).collect()
    }
}

impl fmt::Display for Scenario {
    /// A line for each call and each fault.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { grid, under_way, stubborn, .. } = self;
        write!(f, "mesh {:?}, under way: {under_way:?}, stubborn: {stubborn:?}", grid.0)?;
        for (number, call) in self.calls.iter().enumerate() {
            write!(f, "\n{number}: {call:?}")?;
        }
        self.faults.iter().try_for_each(|fault| write!(f, "\n{fault:?}"))
    }
}
