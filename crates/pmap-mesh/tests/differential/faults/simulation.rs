//! What must come of a scenario: the replicas do one thing after the other until nobody can go on.

use std::collections::{BTreeMap, BTreeSet};

use crate::differential::{
    faults::{Call, Failure, Kind, NO_DATA, Scenario, Step},
    grid::{Axes, Grid, sorted},
    op::Op,
};

/// What a replica does next.
#[derive(Clone, Debug)]
enum Act {
    Call(Call),
    /// Starts a sum, and keeps it under this number.
    Start(usize, Axes),
    Wait(usize),
    Fail(Failure),
    Return,
    /// Does nothing until the call has ended.
    StayAway,
}

/// A replica under way.
#[derive(Clone, Debug)]
struct Runner {
    /// In reverse, so that the next one is the last.
    rest: Vec<Act>,
    state: State,
    /// To how many collectives along each set of axes it has come.
    counts: BTreeMap<Axes, usize>,
    /// What it has started and not waited for.
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

/// A collective: its axes, the members of its group, and which of the group's it is.
type Place = (Axes, Vec<usize>, usize);

/// What each slot that has come to a collective calls there.
type Arrivals = BTreeMap<usize, String>;

/// The replicas, and the collectives that any of them has come to.
struct World<'a> {
    grid: &'a Grid,
    runners: Vec<Runner>,
    arrivals: BTreeMap<Place, Arrivals>,
    failures: BTreeSet<Failure>,
}

/// The failures of which the call tells one; none if it succeeds.
///
/// Which one is first depends on time. What is waited for in vain stays so, whatever else happens:
/// so it is enough to look at the end.
pub(crate) fn failures(scenario: &Scenario) -> BTreeSet<Failure> {
    let grid = &scenario.grid;
    let runner = |slot| Runner {
        rest: acts(scenario, slot),
        state: State::Running,
        counts: BTreeMap::new(),
        pending: BTreeMap::new(),
    };
    let runners = (0..grid.slots()).map(runner).collect();
    let mut world = World { grid, runners, arrivals: BTreeMap::new(), failures: BTreeSet::new() };
    world.run();
    world.note_end();
    world.failures
}

/// What a slot does, in reverse.
fn acts(scenario: &Scenario, slot: usize) -> Vec<Act> {
    let each = scenario.steps.iter().enumerate();
    let mut acts: Vec<Act> = each
        .flat_map(|(at, step)| match scenario.fault(slot, at) {
            None => vec![as_usual(at, step)],
            Some(kind) => instead(scenario, slot, at, kind),
        })
        .collect();
    acts.push(Act::Return);
    acts.reverse();
    acts
}

fn as_usual(at: usize, step: &Step) -> Act {
    match step {
        Step::Call(call) => Act::Call(call.clone()),
        Step::Start(axes) => Act::Start(at, axes.clone()),
        Step::Wait(started) => Act::Wait(*started),
    }
}

fn instead(scenario: &Scenario, slot: usize, at: usize, kind: &Kind) -> Vec<Act> {
    let step = &scenario.steps[at];
    // An error that only the replica itself knows of.
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
            let again = match step {
                // Kept where nobody looks for it.
                Step::Start(axes) => Act::Start(at + scenario.steps.len(), axes.clone()),
                step => as_usual(at, step),
            };
            vec![as_usual(at, step), again]
        }
        Kind::NoSuchDim => own_error("out of range"),
        Kind::NoSuchAxis => vec![Act::Fail(Failure::UnknownAxis)],
        Kind::NoSuchRoot => own_error("of a group of"),
        Kind::Nested => own_error("cannot be called inside a replica"),
        Kind::OtherThread => vec![as_usual(at, step)],
        Kind::Late => vec![Act::StayAway],
    }
}

impl World<'_> {
    /// Lets every replica go on until it waits in vain or has ended.
    fn run(&mut self) {
        while let Some(slot) = (0..self.runners.len()).find(|&slot| self.can_go_on(slot)) {
            self.runners[slot].state = State::Running;
            let act = self.runners[slot].rest.pop().expect("the last act is to return");
            self.runners[slot].state = self.after(slot, act);
        }
    }

    fn can_go_on(&self, slot: usize) -> bool {
        match &self.runners[slot].state {
            State::Running => true,
            State::Waiting(place) => self.is_complete(place),
            State::Returned | State::Failed | State::Late => false,
        }
    }

    /// Whether all members have come and call the same.
    fn is_complete(&self, place: &Place) -> bool {
        let calls = &self.arrivals[place];
        calls.len() == place.1.len()
            && calls.values().all(|call| Some(call) == calls.values().next())
    }

    fn after(&mut self, slot: usize, act: Act) -> State {
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

    /// Has a slot come to its next collective along these axes; none in a group of one.
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

    /// Notes what is wrong when nobody can go on.
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
        let of_place = |calls: &Arrivals| {
            let mut found = Vec::new();
            for (left, call) in calls {
                let others = calls.range(left + 1..).filter(|(_, other)| *other != call);
                found.extend(others.map(|(right, _)| Failure::Mismatch(*left, *right)));
            }
            found
        };
        self.arrivals.values().flat_map(of_place).collect()
    }

    /// Slots that have returned, and those that have come where they will not.
    fn desertions(&self) -> Vec<Failure> {
        let mut found = Vec::new();
        for ((_, members, _), calls) in &self.arrivals {
            let has_gone = |slot: &&usize| {
                !calls.contains_key(slot) && self.runners[**slot].state == State::Returned
            };
            for &slot in members.iter().filter(has_gone) {
                found.extend(calls.keys().map(|&waiting| Failure::PeerReturned { slot, waiting }));
            }
        }
        found
    }
}

/// What all members of a group must call alike.
fn agreed(call: &Call) -> String {
    let Call { op, dtype, shape, .. } = call;
    match op {
        Op::Barrier => "barrier".to_owned(),
        // The sizes of this dimension may differ.
        Op::AllGather { dim: 0 } => format!("{op:?} {dtype:?} {:?}", &shape[1..]),
        _ => format!("{op:?} {dtype:?} {shape:?}"),
    }
}
