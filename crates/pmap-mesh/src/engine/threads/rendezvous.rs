//! How the replicas of one call meet: each waits until all of its group have come, or learns why
//! they will not.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use candle_core::Tensor;

use crate::{
    engine::call::CollectiveCall,
    error::Error,
    mesh::{axes::AxisSet, topology::Topology},
    reduce::Board,
    sync::{self, lock},
};

/// What all members of a group brought to a meeting.
#[derive(Default)]
pub(crate) struct Meeting {
    /// The tensors of each member, in the order of the group.
    pub(crate) brought: Vec<Vec<Tensor>>,
    /// Something that the members work on together, or why it could not be made.
    board: OnceLock<Result<Board, String>>,
}

/// The meeting places of one call, shared by its replicas.
#[derive(Debug)]
pub(crate) struct Hub {
    topology: Arc<Topology>,
    deadline: Option<Duration>,
    desks: Vec<Desk>,
    failed: AtomicBool,
    state: Mutex<State>,
}

/// What a waiting replica looks at.
#[derive(Debug, Default)]
struct Desk {
    /// Whether there is something in its inbox.
    called: AtomicBool,
}

#[derive(Default)]
struct State {
    open: BTreeMap<(AxisSet, usize), Open>,
    replicas: Vec<ReplicaState>,
    failures: Vec<(usize, Error)>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").field("failures", &self.failures).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct ReplicaState {
    waits_for: Option<Arc<CollectiveCall>>,
    thread: Option<Thread>,
    inbox: Option<Arc<Meeting>>,
    returned: bool,
    /// Whether it was told that another replica failed; its own error is then only an echo.
    aborted: bool,
}

/// A meeting to which some members have not come yet.
struct Open {
    missing: usize,
    seats: Vec<Option<(Arc<CollectiveCall>, Vec<Tensor>)>>,
}

impl Hub {
    pub(crate) fn new(topology: Arc<Topology>, deadline: Option<Duration>) -> Self {
        let slots = topology.slots();
        let replicas = (0..slots).map(|_| ReplicaState::default()).collect();
        let state = State { replicas, ..State::default() };
        let desks = (0..slots).map(|_| Desk::default()).collect();
        Self { topology, deadline, desks, failed: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// Brings `tensors` to the meeting of `slot`'s group along `call.set`, and waits for the
    /// others.
    ///
    /// Nobody leaves before all have come, so what was brought to one meeting may be changed after
    /// the next.
    ///
    /// # Errors
    ///
    /// The text of what went wrong; [`take_failure`](Self::take_failure) returns the error itself.
    pub(crate) fn meet(
        &self,
        slot: usize,
        call: Arc<CollectiveCall>,
        tensors: Vec<Tensor>,
    ) -> candle_core::Result<Arc<Meeting>> {
        if let Some(meeting) = self.arrive(slot, &call, tensors)? {
            return Ok(meeting);
        }
        let deadline = self.deadline.and_then(|deadline| Instant::now().checked_add(deadline));
        let called = || {
            self.desks[slot].called.load(Ordering::Acquire) || self.failed.load(Ordering::Acquire)
        };
        let in_time = sync::until(deadline, called);
        let mut state = lock(&self.state);
        let replica = &mut state.replicas[slot];
        replica.waits_for = None;
        if let Some(meeting) = replica.inbox.take() {
            self.desks[slot].called.store(false, Ordering::Release);
            return Ok(meeting);
        }
        if !in_time && state.failures.is_empty() {
            let after = self.deadline.unwrap_or_default();
            let missing = self.missing(&state, slot, &call);
            self.fail(&mut state, slot, Error::Deadline { index: slot, missing, call, after });
        }
        Err(state.abort(slot))
    }

    /// Takes the replica's seat; returns the meeting if it was the last one missing.
    fn arrive(
        &self,
        slot: usize,
        call: &Arc<CollectiveCall>,
        tensors: Vec<Tensor>,
    ) -> candle_core::Result<Option<Arc<Meeting>>> {
        let groups = self.topology.groups(call.set);
        let (group, position) = groups.seat(slot);
        let members = groups.members(group);
        let mut state = lock(&self.state);
        if self.failed.load(Ordering::Acquire) {
            return Err(state.abort(slot));
        }
        if let Some(pending) = &state.replicas[slot].waits_for {
            let error = Error::Mismatch {
                left: slot,
                left_call: Arc::clone(pending),
                right: slot,
                right_call: Arc::clone(call),
            };
            return Err(self.refuse(&mut state, slot, error));
        }
        if let Some(&gone) = members.iter().find(|&&member| state.replicas[member].returned) {
            let error = Error::Deserted { index: gone, waiting: slot, call: Arc::clone(call) };
            return Err(self.refuse(&mut state, slot, error));
        }
        let key = (call.set, group);
        let open = state.open.entry(key).or_insert_with(|| Open::new(members.len()));
        if let Some((first, other)) = open.first()
            && !other.agrees_with(call)
        {
            let error = Error::Mismatch {
                left: members[first],
                left_call: Arc::clone(other),
                right: slot,
                right_call: Arc::clone(call),
            };
            return Err(self.refuse(&mut state, slot, error));
        }
        open.seats[position] = Some((Arc::clone(call), tensors));
        open.missing -= 1;
        if open.missing > 0 {
            state.replicas[slot].waits_for = Some(Arc::clone(call));
            state.replicas[slot].thread = Some(thread::current());
            return self.check_progress(&mut state, slot).map(|()| None);
        }
        let meeting = state.open.remove(&key).map(Open::close).unwrap_or_default();
        for &member in members.iter().filter(|&&member| member != slot) {
            let replica = &mut state.replicas[member];
            replica.waits_for = None;
            replica.inbox = Some(Arc::clone(&meeting));
            self.desks[member].called.store(true, Ordering::Release);
            replica.wake();
        }
        Ok(Some(meeting))
    }

    /// Notes that a replica has returned; whoever waits for it learns that it will not come.
    pub(crate) fn returned(&self, slot: usize) {
        let mut state = lock(&self.state);
        state.replicas[slot].returned = true;
        if !state.failures.is_empty() {
            // What others wait for has been told to them.
            return;
        }
        let deserted = state.open.iter().find_map(|(&(set, group), open)| {
            let groups = self.topology.groups(set);
            let members = groups.members(group);
            let (position, call) = open.first().filter(|_| members.contains(&slot))?;
            Some((members[position], Arc::clone(call)))
        });
        if let Some((waiting, call)) = deserted {
            self.fail(&mut state, slot, Error::Deserted { index: slot, waiting, call });
        } else {
            // Who has returned need not be told.
            drop(self.check_progress(&mut state, slot));
        }
    }

    /// Ends the call for all replicas because of an error of this one, unless it only echoes
    /// another's.
    pub(crate) fn failed(&self, slot: usize, error: Error) {
        let mut state = lock(&self.state);
        if !state.replicas[slot].aborted {
            self.fail(&mut state, slot, error);
        }
    }

    /// The error that ended the call, if one did: of several, that of the first replica.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        let mut failures = std::mem::take(&mut lock(&self.state).failures);
        failures.sort_by_key(|(slot, _)| *slot);
        failures.into_iter().next().map(|(_, error)| error)
    }

    /// Who has not come to the meeting that a replica waits in.
    fn missing(&self, state: &State, slot: usize, call: &CollectiveCall) -> Vec<usize> {
        let groups = self.topology.groups(call.set);
        let Some(open) = state.open.get(&(call.set, groups.seat(slot).0)) else {
            return Vec::new();
        };
        let members = groups.members_with(slot).iter().zip(&open.seats);
        members.filter(|(_, seat)| seat.is_none()).map(|(member, _)| *member).collect()
    }

    /// Fails if every replica that still runs waits in a meeting that is not complete.
    fn check_progress(&self, state: &mut State, slot: usize) -> candle_core::Result<()> {
        let stuck = |replica: &ReplicaState| replica.returned || replica.waits_for.is_some();
        if !state.replicas.iter().all(stuck)
            || state.replicas.iter().all(|replica| replica.returned)
        {
            return Ok(());
        }
        let waiting = state.replicas.iter().enumerate();
        let waiting = waiting
            .filter_map(|(slot, replica)| Some((slot, replica.waits_for.clone()?)))
            .collect();
        Err(self.refuse(state, slot, Error::Deadlock { waiting }))
    }

    /// Fails for all, and tells the replica that noticed.
    fn refuse(&self, state: &mut State, slot: usize, error: Error) -> candle_core::Error {
        self.fail(state, slot, error);
        state.abort(slot)
    }

    fn fail(&self, state: &mut State, slot: usize, error: Error) {
        state.failures.push((slot, error));
        self.failed.store(true, Ordering::Release);
        state.replicas.iter().for_each(ReplicaState::wake);
    }
}

impl State {
    /// What a replica is told when the call has failed.
    fn abort(&mut self, slot: usize) -> candle_core::Error {
        self.replicas[slot].aborted = true;
        let by = self
            .failures
            .first()
            .map(|(by, error)| Error::Aborted { by: *by, cause: error.to_string() });
        by.map_or_else(|| candle_core::Error::msg("the call has ended"), candle_core::Error::wrap)
    }
}

impl ReplicaState {
    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }
}

impl Open {
    fn new(members: usize) -> Self {
        Self { missing: members, seats: (0..members).map(|_| None).collect() }
    }

    /// The first member that has come, and what it called.
    fn first(&self) -> Option<(usize, &Arc<CollectiveCall>)> {
        self.seats
            .iter()
            .enumerate()
            .find_map(|(position, seat)| Some((position, &seat.as_ref()?.0)))
    }

    fn close(self) -> Arc<Meeting> {
        let brought = self.seats.into_iter().flatten().map(|(_, tensors)| tensors).collect();
        Arc::new(Meeting { brought, board: OnceLock::new() })
    }
}

impl Meeting {
    /// The one tensor that each member brought.
    pub(crate) fn firsts(&self) -> Vec<Tensor> {
        self.brought.iter().filter_map(|tensors| tensors.first().cloned()).collect()
    }

    /// The tensor number `index` of each member.
    pub(crate) fn nths(&self, index: usize) -> candle_core::Result<Vec<Tensor>> {
        let nth = |tensors: &Vec<Tensor>| tensors.get(index).cloned();
        let missing = || candle_core::Error::msg(format!("a replica brought no tensor {index}"));
        self.brought.iter().map(nth).collect::<Option<_>>().ok_or_else(missing)
    }

    /// The board that the members work on, made by whoever needs it first.
    pub(crate) fn board(
        &self,
        make: impl FnOnce() -> candle_core::Result<Board>,
    ) -> candle_core::Result<&Board> {
        let board = self.board.get_or_init(|| make().map_err(|error| error.to_string()));
        board.as_ref().map_err(candle_core::Error::msg)
    }
}
