//! The possible ends of a scenario: the replicas run one after another until none can continue.

use std::collections::{BTreeMap, BTreeSet};

use crate::differential::{
    faults::{Call, Failure, Kind, NO_DATA, Scenario, Step},
    grid::{Axes, Grid, sorted},
    op::Op,
};

/// The next action of a replica.
#[derive(Clone, Debug)]
enum Act {
    Call(Call),
    /// Starts a sum, and stores it under this index.
    Start(usize, Axes),
    Wait(usize),
    Fail(Failure),
    Return,
    /// Waits until the call has ended.
    StayAway,
}

/// A running replica.
#[derive(Clone, Debug)]
struct Runner {
    /// The remaining actions in reverse, so that the next one is the last.
    rest: Vec<Act>,
    state: State,
    /// The number of collectives that it has reached along each set of axes.
    counts: BTreeMap<Axes, usize>,
    /// The collectives that it has started and not waited for.
    pending: BTreeMap<usize, Option<Place>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Running,
    Waiting(Place),
    Returned,
    Failed,
    Late,
}

/// A collective: its axes, the members of its group, and its number there.
type Place = (Axes, Vec<usize>, usize);

/// The call of each slot that has reached a collective.
type Arrivals = BTreeMap<usize, String>;

/// The replicas, and the collectives that any of them has reached.
struct World<'a> {
    grid: &'a Grid,
    runners: Vec<Runner>,
    arrivals: BTreeMap<Place, Arrivals>,
    failures: BTreeSet<Failure>,
}

/// Returns the failures that the call may report; empty if it succeeds.
///
/// Timing decides which one comes first. A wait that is in vain stays in vain, so it is enough to
/// look at the end.
pub(crate) fn failures(scenario: &Scenario) -> BTreeSet<Failure> {
    let grid = &scenario.grid;
    let runners = (0..grid.slots()).map(|slot| Runner {
        rest: acts(scenario, slot),
        state: State::Running,
        counts: BTreeMap::new(),
        pending: BTreeMap::new(),
    });
    let runners = runners.collect();
    let mut world = World { grid, runners, arrivals: BTreeMap::new(), failures: BTreeSet::new() };
    world.run();
    world.note_end();
    world.failures
}

/// Returns the actions of a slot, in reverse.
fn acts(scenario: &Scenario, slot: usize) -> Vec<Act> {
    let each = scenario.steps.iter().enumerate();
    let mut acts: Vec<Act> = each
        .flat_map(|(index, step)| match scenario.fault(slot, index) {
            None => vec![run_step(index, step)],
            Some(kind) => instead(scenario, slot, index, kind),
        })
        .collect();
    acts.push(Act::Return);
    acts.reverse();
    acts
}

fn run_step(index: usize, step: &Step) -> Act {
    match step {
        Step::Call(call) => Act::Call(call.clone()),
        Step::Start(axes) => Act::Start(index, axes.clone()),
        Step::Wait(started) => Act::Wait(*started),
    }
}

fn instead(scenario: &Scenario, slot: usize, index: usize, kind: &Kind) -> Vec<Act> {
    let step = &scenario.steps[index];
    // An error that only the replica itself sees.
    let own_error = |text| {
        let failure = Act::Fail(Failure::Failed(slot, text));
        if scenario.stubborn.contains(&slot) { Vec::new() } else { vec![failure] }
    };
    match kind {
        Kind::Error => vec![Act::Fail(Failure::Failed(slot, NO_DATA))],
        Kind::Panic => vec![Act::Fail(Failure::Panicked(slot))],
        Kind::Return => vec![Act::Return],
        Kind::Other(other) => vec![Act::Call(other.clone())],
        Kind::Skip => Vec::new(),
        Kind::Twice | Kind::TwoThreads => {
            let second = match step {
                // Store it where no step looks for it.
                Step::Start(axes) => Act::Start(index + scenario.steps.len(), axes.clone()),
                step => run_step(index, step),
            };
            vec![run_step(index, step), second]
        }
        Kind::NoSuchDim => own_error("out of range"),
        Kind::NoSuchAxis => vec![Act::Fail(Failure::UnknownAxis)],
        Kind::NoSuchRoot => own_error("of a group of"),
        Kind::Nested => own_error("cannot be called inside a replica"),
        Kind::WrongThread => vec![run_step(index, step)],
        Kind::Late => vec![Act::StayAway],
    }
}

impl World<'_> {
    /// Runs every replica until it waits in vain or has ended.
    fn run(&mut self) {
        while let Some(slot) = (0..self.runners.len()).find(|&slot| self.can_go_on(slot)) {
            self.runners[slot].state = State::Running;
            let act = self.runners[slot].rest.pop().expect("the last act is to return");
            self.runners[slot].state = self.advance(slot, act);
        }
    }

    fn can_go_on(&self, slot: usize) -> bool {
        match &self.runners[slot].state {
            State::Running => true,
            State::Waiting(place) => self.is_complete(place),
            State::Returned | State::Failed | State::Late => false,
        }
    }

    /// Returns true if all members have arrived with the same call.
    fn is_complete(&self, place: &Place) -> bool {
        let calls = &self.arrivals[place];
        calls.len() == place.1.len()
            && calls.values().all(|call| Some(call) == calls.values().next())
    }

    fn advance(&mut self, slot: usize, act: Act) -> State {
        match act {
            Act::Call(call) => {
                let come = self.come(slot, &call.axes, agreed(&call));
                come.map_or(State::Running, State::Waiting)
            }
            Act::Start(number, axes) => {
                let come = self.come(slot, &axes, "start".to_owned());
                self.runners[slot].pending.insert(number, come);
                State::Running
            }
            Act::Wait(number) => {
                let pending = self.runners[slot].pending.remove(&number).flatten();
                pending.map_or(State::Running, State::Waiting)
            }
            Act::Fail(failure) => {
                self.failures.insert(failure);
                State::Failed
            }
            Act::Return if !self.runners[slot].pending.is_empty() => {
                self.failures.insert(Failure::NeverAwaited(slot));
                State::Failed
            }
            Act::Return => State::Returned,
            Act::StayAway => State::Late,
        }
    }

    /// Moves a slot to its next collective along these axes; returns `None` for a group of one.
    fn come(&mut self, slot: usize, axes: &Axes, call: String) -> Option<Place> {
        let members = self.grid.members(axes, slot);
        if members.len() == 1 {
            return None;
        }
        let axes = sorted(axes);
        let count = self.runners[slot].counts.entry(axes.clone()).or_default();
        *count += 1;
        let place = (axes, members, *count);
        self.arrivals.entry(place.clone()).or_default().insert(slot, call);
        Some(place)
    }

    /// Records the failures once no replica can continue.
    fn note_end(&mut self) {
        let found = [self.disagreements(), self.desertions()].concat();
        self.failures.extend(found);
        let is = |what: fn(&State) -> bool| self.runners.iter().any(|runner| what(&runner.state));
        if is(|state| *state == State::Late) {
            self.failures.insert(Failure::Deadline);
        } else if self.failures.is_empty() && is(|state| matches!(state, State::Waiting(_))) {
            self.failures.insert(Failure::Deadlock);
        }
    }

    fn disagreements(&self) -> Vec<Failure> {
        let mut disagreements = Vec::new();
        for calls in self.arrivals.values() {
            for (left, call) in calls {
                let others = calls.range(left + 1..).filter(|(_, other)| *other != call);
                disagreements.extend(others.map(|(right, _)| Failure::Mismatch(*left, *right)));
            }
        }
        disagreements
    }

    /// Returns pairs of a slot that has returned and a slot that waits for it.
    fn desertions(&self) -> Vec<Failure> {
        let mut found = Vec::new();
        for ((_, members, _), calls) in &self.arrivals {
            for &slot in members.iter().filter(|slot| {
                !calls.contains_key(slot) && self.runners[**slot].state == State::Returned
            }) {
                found.extend(calls.keys().map(|&waiting| Failure::PeerReturned { slot, waiting }));
            }
        }
        found
    }
}

/// Returns the part of a call that must agree in a group.
fn agreed(call: &Call) -> String {
    let Call { op, dtype, shape, .. } = call;
    match op {
        Op::Barrier => "barrier".to_owned(),
        // The sizes of this dimension may differ.
        Op::AllGather { dim: 0 } => format!("{op:?} {dtype:?} {:?}", &shape[1..]),
        _ => format!("{op:?} {dtype:?} {shape:?}"),
    }
}
