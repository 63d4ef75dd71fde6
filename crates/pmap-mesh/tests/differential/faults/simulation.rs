//! What must come of a scenario: the replicas do one thing after the other until nobody can go on.

use crate::{
    faults::{Call, Failure, Fault, Kind, NO_DATA, Scenario},
    grid::{Axes, Grid, sorted},
    op::Op,
};

/// What a replica does next.
#[derive(Clone, Debug)]
enum Act {
    Call(Call),
    Fail(Failure),
    Return,
}

/// A replica under way.
#[derive(Clone, Debug)]
struct Runner {
    /// In reverse, so that the next one is the last.
    rest: Vec<Act>,
    state: State,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Running,
    Waiting(Site),
    Returned,
    Failed,
}

/// Where and with what a replica waits.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Site {
    axes: Axes,
    members: Vec<usize>,
    /// What must agree.
    call: String,
}

/// The failures of which the call tells one; none if it succeeds.
///
/// Which one is first depends on time. What is waited for in vain stays so, whatever else happens:
/// so it is enough to look at the end.
pub(crate) fn failures(scenario: &Scenario) -> Vec<Failure> {
    let grid = &scenario.grid;
    let mut runners: Vec<Runner> = (0..grid.slots())
        .map(|slot| Runner { rest: acts(scenario, slot), state: State::Running })
        .collect();
    let mut failures = Vec::new();
    while runners.iter().any(|runner| runner.state == State::Running) {
        let each = runners.iter_mut().enumerate();
        failures.extend(each.filter_map(|(slot, runner)| runner.run(grid, slot)));
        release(&mut runners);
    }
    failures.extend(disagreements(&runners));
    failures.extend(desertions(&runners));
    if failures.is_empty() && runners.iter().any(|runner| runner.site().is_some()) {
        failures.push(Failure::Deadlock);
    }
    failures
}

/// What a slot does, in reverse.
fn acts(scenario: &Scenario, slot: usize) -> Vec<Act> {
    let of_call = |(at, call): (usize, &Call)| {
        let fault = scenario.faults.iter().find(|fault| fault.slot == slot && fault.at == at);
        instead(scenario, fault, call)
    };
    let mut acts: Vec<Act> = scenario.calls.iter().enumerate().flat_map(of_call).collect();
    acts.push(Act::Return);
    acts.reverse();
    acts
}

fn instead(scenario: &Scenario, fault: Option<&Fault>, call: &Call) -> Vec<Act> {
    let Some(Fault { slot, kind, .. }) = fault else { return vec![Act::Call(call.clone())] };
    // An error that only the replica itself knows of.
    let own_error = |text| {
        let failure = Act::Fail(Failure::Failed(*slot, text));
        if scenario.stubborn.contains(slot) { Vec::new() } else { vec![failure] }
    };
    match kind {
        Kind::Error => vec![Act::Fail(Failure::Failed(*slot, NO_DATA))],
        Kind::Panic => vec![Act::Fail(Failure::Panicked(*slot))],
        Kind::Return if scenario.under_way.is_some() => {
            vec![Act::Fail(Failure::NotWaited(*slot))]
        }
        Kind::Return => vec![Act::Return],
        Kind::Other(other) => vec![Act::Call(other.clone())],
        Kind::Skip => Vec::new(),
        Kind::Twice | Kind::TwoThreads => vec![Act::Call(call.clone()); 2],
        Kind::NoSuchDim => own_error("out of range"),
        Kind::NoSuchAxis => vec![Act::Fail(Failure::UnknownAxis)],
        Kind::NoSuchRoot => own_error("of a group of"),
        Kind::Nested => own_error("cannot be called inside a replica"),
        Kind::OtherThread => vec![Act::Call(call.clone())],
    }
}

impl Runner {
    /// Runs until it waits or ends; returns its failure.
    fn run(&mut self, grid: &Grid, slot: usize) -> Option<Failure> {
        while self.state == State::Running {
            match self.rest.pop().expect("the last act is to return") {
                Act::Call(call) => {
                    let members = grid.members(&call.axes, slot);
                    if members.len() > 1 {
                        let axes = sorted(&call.axes);
                        self.state = State::Waiting(Site { axes, members, call: agreed(&call) });
                    }
                }
                Act::Return => self.state = State::Returned,
                Act::Fail(failure) => {
                    self.state = State::Failed;
                    return Some(failure);
                }
            }
        }
        None
    }

    fn site(&self) -> Option<&Site> {
        match &self.state {
            State::Waiting(site) => Some(site),
            _ => None,
        }
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

/// Lets those run on whose group is complete and agrees.
fn release(runners: &mut [Runner]) {
    for slot in 0..runners.len() {
        let Some(site) = runners[slot].site().cloned() else { continue };
        if site.members.iter().all(|&member| runners[member].site() == Some(&site)) {
            site.members.iter().for_each(|&member| runners[member].state = State::Running);
        }
    }
}

fn disagreements(runners: &[Runner]) -> Vec<Failure> {
    let mut found = Vec::new();
    for (left, site) in waiting(runners) {
        for (right, other) in waiting(runners).filter(|(right, _)| left < *right) {
            let is_one_group = site.axes == other.axes && site.members == other.members;
            if is_one_group && site.call != other.call {
                found.push(Failure::Mismatch(left, right));
            }
        }
    }
    found
}

fn desertions(runners: &[Runner]) -> Vec<Failure> {
    let of_waiting = waiting(runners).flat_map(|(waiting, site)| {
        let gone = |slot: &&usize| runners[**slot].state == State::Returned;
        site.members.iter().filter(gone).map(move |&slot| Failure::Deserted { slot, waiting })
    });
    of_waiting.collect()
}

fn waiting(runners: &[Runner]) -> impl Iterator<Item = (usize, &Site)> {
    runners.iter().enumerate().filter_map(|(slot, runner)| Some((slot, runner.site()?)))
}
