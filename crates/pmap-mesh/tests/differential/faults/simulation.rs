//! The possible ends of a scenario: the replicas run one after another until none can continue.

use std::collections::{BTreeMap, BTreeSet};

use crate::differential::{
    faults::{CallFailure, CollectiveCall, FaultKind, NO_DATA, Scenario, ScenarioStep},
    grid::{Axes, Grid, sorted},
    op::Op,
};

/// The next action of a replica.
#[derive(Clone, Debug)]
enum ReplicaAction {
    Call(CollectiveCall),
    /// Starts a sum, and stores it under this index.
    Start(usize, Axes),
    Wait(usize),
    Fail(CallFailure),
    Return,
    /// Waits until the call has ended.
    StayAway,
}

/// A running replica.
#[derive(Clone, Debug)]
struct SimulatedReplica {
    /// The remaining actions in reverse, so that the next one is the last.
    rest: Vec<ReplicaAction>,
    state: ReplicaState,
    /// The number of collectives that the replica has reached along each set of axes.
    counts: BTreeMap<Axes, usize>,
    /// The collectives that the replica has started and not awaited.
    pending: BTreeMap<usize, Option<CollectiveKey>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ReplicaState {
    Running,
    Waiting(CollectiveKey),
    Returned,
    Failed,
    Late,
}

/// A collective: its axes, the members of its group, and its number within the group.
type CollectiveKey = (Axes, Vec<usize>, usize);

/// The call of each slot that has reached a collective.
type SlotCalls = BTreeMap<usize, String>;

/// The replicas, and the collectives that at least one replica has reached.
struct SimulatedMesh<'a> {
    grid: &'a Grid,
    replicas: Vec<SimulatedReplica>,
    arrivals: BTreeMap<CollectiveKey, SlotCalls>,
    failures: BTreeSet<CallFailure>,
}

/// Returns the failures that the call may report; empty if it succeeds.
///
/// Timing decides which failure comes first. A replica that waits in vain waits to the end, so it
/// is enough to look at the end.
pub(crate) fn failures(scenario: &Scenario) -> BTreeSet<CallFailure> {
    let grid = &scenario.grid;
    let replicas = (0..grid.slots()).map(|slot| SimulatedReplica {
        rest: actions(scenario, slot),
        state: ReplicaState::Running,
        counts: BTreeMap::new(),
        pending: BTreeMap::new(),
    });
    let replicas = replicas.collect();
    let mut simulated =
        SimulatedMesh { grid, replicas, arrivals: BTreeMap::new(), failures: BTreeSet::new() };
    simulated.run();
    simulated.note_end();
    simulated.failures
}

/// Returns the actions of a slot, in reverse.
fn actions(scenario: &Scenario, slot: usize) -> Vec<ReplicaAction> {
    let each = scenario.steps.iter().enumerate();
    let mut actions: Vec<ReplicaAction> = each
        .flat_map(|(index, step)| match scenario.fault(slot, index) {
            None => vec![run_step(index, step)],
            Some(kind) => instead(scenario, slot, index, kind),
        })
        .collect();
    actions.push(ReplicaAction::Return);
    actions.reverse();
    actions
}

fn run_step(index: usize, step: &ScenarioStep) -> ReplicaAction {
    match step {
        ScenarioStep::Call(call) => ReplicaAction::Call(call.clone()),
        ScenarioStep::Start(axes) => ReplicaAction::Start(index, axes.clone()),
        ScenarioStep::Wait(started) => ReplicaAction::Wait(*started),
    }
}

fn instead(scenario: &Scenario, slot: usize, index: usize, kind: &FaultKind) -> Vec<ReplicaAction> {
    let step = &scenario.steps[index];
    // An error that only the replica itself sees.
    let own_error = |text| {
        let failure = ReplicaAction::Fail(CallFailure::Failed(slot, text));
        if scenario.stubborn.contains(&slot) { Vec::new() } else { vec![failure] }
    };
    match kind {
        FaultKind::Error => vec![ReplicaAction::Fail(CallFailure::Failed(slot, NO_DATA))],
        FaultKind::Panic => vec![ReplicaAction::Fail(CallFailure::Panicked(slot))],
        FaultKind::Return => vec![ReplicaAction::Return],
        FaultKind::Other(other) => vec![ReplicaAction::Call(other.clone())],
        FaultKind::Skip => Vec::new(),
        FaultKind::Twice | FaultKind::TwoThreads => {
            let second = match step {
                // Store it where no step looks for it.
                ScenarioStep::Start(axes) => {
                    ReplicaAction::Start(index + scenario.steps.len(), axes.clone())
                }
                step => run_step(index, step),
            };
            vec![run_step(index, step), second]
        }
        FaultKind::NoSuchDim => own_error("out of range"),
        FaultKind::NoSuchAxis => vec![ReplicaAction::Fail(CallFailure::UnknownAxis)],
        FaultKind::NoSuchRoot => own_error("of a group of"),
        FaultKind::Nested => own_error("cannot be called inside a replica"),
        FaultKind::WrongThread => vec![run_step(index, step)],
        FaultKind::Late => vec![ReplicaAction::StayAway],
    }
}

impl SimulatedMesh<'_> {
    /// Runs every replica until it waits in vain or has ended.
    fn run(&mut self) {
        while let Some(slot) = (0..self.replicas.len()).find(|&slot| self.can_go_on(slot)) {
            self.replicas[slot].state = ReplicaState::Running;
            let action = self.replicas[slot].rest.pop().expect("the last action ends the replica");
            self.replicas[slot].state = self.advance(slot, action);
        }
    }

    fn can_go_on(&self, slot: usize) -> bool {
        match &self.replicas[slot].state {
            ReplicaState::Running => true,
            ReplicaState::Waiting(key) => self.is_complete(key),
            ReplicaState::Returned | ReplicaState::Failed | ReplicaState::Late => false,
        }
    }

    /// Returns true if all members have arrived with the same call.
    fn is_complete(&self, key: &CollectiveKey) -> bool {
        let calls = &self.arrivals[key];
        calls.len() == key.1.len() && calls.values().all(|call| Some(call) == calls.values().next())
    }

    fn advance(&mut self, slot: usize, action: ReplicaAction) -> ReplicaState {
        match action {
            ReplicaAction::Call(call) => {
                let key = self.arrive(slot, &call.axes, agreed(&call));
                key.map_or(ReplicaState::Running, ReplicaState::Waiting)
            }
            ReplicaAction::Start(number, axes) => {
                let key = self.arrive(slot, &axes, "start".to_owned());
                self.replicas[slot].pending.insert(number, key);
                ReplicaState::Running
            }
            ReplicaAction::Wait(number) => {
                let pending = self.replicas[slot].pending.remove(&number).flatten();
                pending.map_or(ReplicaState::Running, ReplicaState::Waiting)
            }
            ReplicaAction::Fail(failure) => {
                self.failures.insert(failure);
                ReplicaState::Failed
            }
            ReplicaAction::Return if !self.replicas[slot].pending.is_empty() => {
                self.failures.insert(CallFailure::NeverAwaited(slot));
                ReplicaState::Failed
            }
            ReplicaAction::Return => ReplicaState::Returned,
            ReplicaAction::StayAway => ReplicaState::Late,
        }
    }

    /// Moves a slot to its next collective along these axes; returns `None` for a group of one.
    fn arrive(&mut self, slot: usize, axes: &Axes, call: String) -> Option<CollectiveKey> {
        let members = self.grid.members(axes, slot);
        if members.len() == 1 {
            return None;
        }
        let axes = sorted(axes);
        let count = self.replicas[slot].counts.entry(axes.clone()).or_default();
        *count += 1;
        let key = (axes, members, *count);
        self.arrivals.entry(key.clone()).or_default().insert(slot, call);
        Some(key)
    }

    /// Records the failures once no replica can continue.
    fn note_end(&mut self) {
        let found = [self.disagreements(), self.desertions()].concat();
        self.failures.extend(found);
        let any = |has_state: fn(&ReplicaState) -> bool| {
            self.replicas.iter().any(|replica| has_state(&replica.state))
        };
        if any(|state| *state == ReplicaState::Late) {
            self.failures.insert(CallFailure::Deadline);
        } else if self.failures.is_empty() && any(|state| matches!(state, ReplicaState::Waiting(_)))
        {
            self.failures.insert(CallFailure::Deadlock);
        }
    }

    fn disagreements(&self) -> Vec<CallFailure> {
        let mut disagreements = Vec::new();
        for calls in self.arrivals.values() {
            for (left, call) in calls {
                let others = calls.range(left + 1..).filter(|(_, other)| *other != call);
                disagreements.extend(others.map(|(right, _)| CallFailure::Mismatch(*left, *right)));
            }
        }
        disagreements
    }

    /// Returns pairs of a slot that has returned and a slot that waits for it.
    fn desertions(&self) -> Vec<CallFailure> {
        let mut found = Vec::new();
        for ((_, members, _), calls) in &self.arrivals {
            for &slot in members.iter().filter(|slot| {
                !calls.contains_key(slot) && self.replicas[**slot].state == ReplicaState::Returned
            }) {
                found.extend(
                    calls.keys().map(|&waiting| CallFailure::PeerReturned { slot, waiting }),
                );
            }
        }
        found
    }
}

/// Returns the part of a call that must be equal in a group, as text.
fn agreed(call: &CollectiveCall) -> String {
    let CollectiveCall { op, dtype, shape, .. } = call;
    match op {
        Op::Barrier => "barrier".to_owned(),
        // The sizes of this dimension may differ.
        Op::AllGather { dim: 0 } => format!("{op:?} {dtype:?} {:?}", &shape[1..]),
        _ => format!("{op:?} {dtype:?} {shape:?}"),
    }
}
