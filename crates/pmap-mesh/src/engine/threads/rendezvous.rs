//! How the replicas of one call meet: each waits until all of its group have come, or learns why
//! they will not.
//!
//! # Synchronization
//!
//! All that the replicas share lies in [`State`], under one lock, which is held for a few
//! instructions and never while waiting or while another lock is taken. A replica that waits does
//! not take it: it looks at two flags, `ready` of its slot and `failed`, and sleeps
//! ([`sync::until`]). Both are set with `Release` while the lock is held, after what they announce
//! was written to the state, and are loaded with `Acquire`; whoever has seen one takes the lock
//! and finds there what it announces. A flag is set before its thread is unparked, so that a
//! replica that is just about to sleep finds either the flag or the permit of `unpark`.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt, mem,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use candle_core::Tensor;

use crate::{
    engine::{Site, call::CollectiveCall},
    error::{CollectiveError, Error},
    mesh::axes::AxisSet,
    reduce::Buffer,
    sync::{self, lock},
};

/// Where the replicas of one call meet, all groups of the mesh.
#[derive(Debug)]
pub(super) struct Rendezvous {
    deadline: Option<Duration>,
    /// For each slot, whether its group is complete and its `inbox` filled. Set by the member that
    /// came last, cleared by the one that was waiting.
    ready: Vec<AtomicBool>,
    /// Whether `failures` is not empty. An atomic beside the locked state, because every replica
    /// that waits looks at it, many times before it sleeps.
    failed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The groups of which some members, but not all, have come.
    open: BTreeMap<(AxisSet, usize), OpenGroup>,
    /// What is known of each slot's replica.
    replicas: Vec<ReplicaState>,
    failures: Vec<(usize, Error)>,
}

#[derive(Default)]
struct ReplicaState {
    /// From its arrival until its thread leaves, with the inbox or an error.
    waits_for: Option<Arc<CollectiveCall>>,
    /// The thread to be woken when the group is complete or the call has failed.
    thread: Option<Thread>,
    /// What the group contributed, until the replica takes it.
    inbox: Option<Arc<Contributions>>,
    returned: bool,
    /// Whether it was told that another replica failed; its own error is then only an echo.
    aborted: bool,
}

/// A group of which some members have not come yet.
struct OpenGroup {
    /// The slots of the group, by rank.
    slots: Arc<[usize]>,
    /// What each member called and contributed, by rank.
    arrivals: Vec<Option<Arrival>>,
    missing: usize,
}

struct Arrival {
    call: Arc<CollectiveCall>,
    tensors: Vec<Tensor>,
}

/// What all members of a group contributed to a collective.
#[derive(Debug)]
pub(super) struct Contributions {
    /// The tensors of each member, by rank.
    by_rank: Vec<Vec<Tensor>>,
    /// Memory that the members fill together, or why there is none.
    buffer: OnceLock<Result<Buffer, String>>,
}

impl Rendezvous {
    pub(super) fn new(slots: usize, deadline: Option<Duration>) -> Self {
        let replicas = (0..slots).map(|_| ReplicaState::default()).collect();
        Self {
            deadline,
            ready: (0..slots).map(|_| AtomicBool::new(false)).collect(),
            failed: AtomicBool::new(false),
            state: Mutex::new(State { replicas, ..State::default() }),
        }
    }

    /// Contributes `tensors` to a collective, and waits for the other members of the group.
    ///
    /// Nobody leaves before all have come, so what was contributed to one collective may be changed
    /// after the next.
    ///
    /// # Errors
    ///
    /// The text of what went wrong; [`take_failure`](Self::take_failure) returns the error itself.
    pub(super) fn meet(
        &self,
        site: &Site,
        tensors: Vec<Tensor>,
    ) -> candle_core::Result<Arc<Contributions>> {
        if let Some(complete) = self.arrive(site, tensors)? {
            return Ok(complete);
        }
        let slot = site.slot();
        let in_time = self.wait(slot);
        let mut state = lock(&self.state);
        state.replicas[slot].waits_for = None;
        if let Some(complete) = state.replicas[slot].inbox.take() {
            // Nobody sets it before this slot has come to its next collective.
            self.ready[slot].store(false, Ordering::Release);
            return Ok(complete);
        }
        match self.deadline {
            Some(after) if !in_time && state.failures.is_empty() => {
                let call = Arc::clone(&site.call);
                let missing = state.missing(site);
                let late = CollectiveError::Deadline { slot, missing, call, after };
                self.end(&mut state, slot, late.into());
            }
            _ => {}
        }
        Err(state.abort(slot))
    }

    /// Waits until the slot's group is complete or the call has failed; returns whether that was in
    /// time.
    fn wait(&self, slot: usize) -> bool {
        // A deadline beyond all time is none.
        let deadline = self.deadline.and_then(|deadline| Instant::now().checked_add(deadline));
        // These pair with the stores in `complete` and `end`.
        sync::until(deadline, || {
            self.ready[slot].load(Ordering::Acquire) || self.failed.load(Ordering::Acquire)
        })
    }

    /// Adds the replica to its group; returns what all contributed if it was the last one missing.
    fn arrive(
        &self,
        site: &Site,
        tensors: Vec<Tensor>,
    ) -> candle_core::Result<Option<Arc<Contributions>>> {
        let slot = site.slot();
        let state = &mut *lock(&self.state);
        // Under the lock, so no failure can be noted between this and the arrival.
        if self.failed.load(Ordering::Acquire) {
            return Err(state.abort(slot));
        }
        if let Some(objection) = state.objection(site) {
            return Err(self.refuse(state, slot, objection));
        }
        let mut open = match state.open.entry(site.key()) {
            Entry::Occupied(open) => open,
            Entry::Vacant(vacant) => vacant.insert_entry(OpenGroup::new(site)),
        };
        open.get_mut().add(site, tensors);
        if open.get().missing == 0 {
            let contributions = open.remove().close();
            self.complete(state, site, &contributions);
            return Ok(Some(contributions));
        }
        state.replicas[slot].waits_for = Some(Arc::clone(&site.call));
        state.replicas[slot].thread = Some(thread::current());
        self.check_progress(state, slot)?;
        Ok(None)
    }

    /// Gives all other members what the group contributed, and wakes them.
    fn complete(&self, state: &mut State, site: &Site, contributions: &Arc<Contributions>) {
        for &slot in site.members().iter().filter(|&&slot| slot != site.slot()) {
            // It still waits, until its own thread leaves: a second thread of the replica that came
            // to a collective in between would take the first one's inbox.
            let replica = &mut state.replicas[slot];
            replica.inbox = Some(Arc::clone(contributions));
            // After the inbox and before the thread is woken: pairs with the load in `wait`.
            self.ready[slot].store(true, Ordering::Release);
            replica.wake();
        }
    }

    /// Notes that a replica has returned; those that wait for it learn that it will not come.
    pub(super) fn finish(&self, slot: usize) {
        let state = &mut *lock(&self.state);
        state.replicas[slot].returned = true;
        if !state.failures.is_empty() {
            // Those that wait have learned of that failure.
            return;
        }
        if let Some((waiting, call)) = state.open.values().find_map(|open| open.waits_for(slot)) {
            self.end(state, slot, CollectiveError::Deserted { slot, waiting, call }.into());
        } else {
            // This replica has returned, so there is nobody to give the error to; the others are
            // woken by it.
            drop(self.check_progress(state, slot));
        }
    }

    /// Ends the call for all replicas because of an error of this one, unless it only echoes
    /// another's.
    pub(super) fn fail(&self, slot: usize, error: Error) {
        let state = &mut *lock(&self.state);
        if !state.replicas[slot].aborted {
            self.end(state, slot, error);
        }
    }

    /// Whether a deadline has ended the call.
    pub(super) fn is_late(&self) -> bool {
        let is_deadline =
            |error: &Error| matches!(error, Error::Collective(CollectiveError::Deadline { .. }));
        lock(&self.state).failures.iter().any(|(_, error)| is_deadline(error))
    }

    /// The error that ended the call, if one did: of several, that of the lowest slot.
    pub(super) fn take_failure(&self) -> Option<Error> {
        let failures = mem::take(&mut lock(&self.state).failures);
        failures.into_iter().min_by_key(|(slot, _)| *slot).map(|(_, error)| error)
    }

    /// Fails if every replica that still runs waits in a group that is not complete.
    fn check_progress(&self, state: &mut State, slot: usize) -> candle_core::Result<()> {
        match state.deadlock() {
            None => Ok(()),
            Some(deadlock) => Err(self.refuse(state, slot, deadlock)),
        }
    }

    /// Ends the call for all, and returns what the replica that noticed is told.
    fn refuse(&self, state: &mut State, slot: usize, error: CollectiveError) -> candle_core::Error {
        self.end(state, slot, error.into());
        state.abort(slot)
    }

    fn end(&self, state: &mut State, slot: usize, error: Error) {
        state.failures.push((slot, error));
        // After the failure and before the threads are woken: pairs with the load in `wait`.
        self.failed.store(true, Ordering::Release);
        state.replicas.iter().for_each(ReplicaState::wake);
    }
}

impl State {
    /// Why a replica cannot take part in a collective, if it cannot.
    fn objection(&self, site: &Site) -> Option<CollectiveError> {
        let slot = site.slot();
        if let Some(pending) = &self.replicas[slot].waits_for {
            return Some(mismatch((slot, pending), site));
        }
        if let Some(&gone) = site.members().iter().find(|&&slot| self.replicas[slot].returned) {
            let call = Arc::clone(&site.call);
            return Some(CollectiveError::Deserted { slot: gone, waiting: slot, call });
        }
        let first = self.open.get(&site.key())?.first()?;
        (!first.1.agrees_with(&site.call)).then(|| mismatch(first, site))
    }

    /// The deadlock, if there is one.
    fn deadlock(&self) -> Option<CollectiveError> {
        if !self.replicas.iter().all(ReplicaState::is_stuck) {
            return None;
        }
        let waiting: Vec<_> = (self.replicas.iter().enumerate())
            .filter_map(|(slot, replica)| Some((slot, replica.waits_for.clone()?)))
            .collect();
        // If none waits, all have returned.
        (!waiting.is_empty()).then_some(CollectiveError::Deadlock { waiting })
    }

    /// The members that have not come to the collective that a replica waits in.
    #[expect(clippy::expect_used, reason = "a replica waits as long as its group is open")]
    fn missing(&self, site: &Site) -> Vec<usize> {
        self.open.get(&site.key()).expect("the group is open").absent().collect()
    }

    /// What a replica is told when the call has failed.
    fn abort(&mut self, slot: usize) -> candle_core::Error {
        self.replicas[slot].aborted = true;
        match self.failures.first() {
            Some((by, error)) => candle_core::Error::wrap(CollectiveError::Aborted {
                by: *by,
                cause: error.to_string(),
            }),
            // The failure was taken: this is a thread that its replica did not wait for.
            None => candle_core::Error::msg("the call has ended"),
        }
    }
}

fn mismatch((left, left_call): (usize, &Arc<CollectiveCall>), right: &Site) -> CollectiveError {
    CollectiveError::Mismatch {
        left,
        left_call: left_call.to_string(),
        right: right.slot(),
        right_call: right.call.to_string(),
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").field("failures", &self.failures).finish_non_exhaustive()
    }
}

impl ReplicaState {
    /// Whether it does nothing more unless others come; what lies in its inbox it is about to take.
    fn is_stuck(&self) -> bool {
        self.returned || (self.waits_for.is_some() && self.inbox.is_none())
    }

    /// Wakes the replica if it has ever waited; one that is awake sleeps once less.
    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }
}

impl OpenGroup {
    fn new(site: &Site) -> Self {
        Self {
            slots: Arc::clone(site.members()),
            arrivals: (0..site.size()).map(|_| None).collect(),
            missing: site.size(),
        }
    }

    fn add(&mut self, site: &Site, tensors: Vec<Tensor>) {
        self.arrivals[site.rank] = Some(Arrival { call: Arc::clone(&site.call), tensors });
        self.missing -= 1;
    }

    /// The member of the lowest rank that has come, and what it called.
    fn first(&self) -> Option<(usize, &Arc<CollectiveCall>)> {
        let mut members = self.slots.iter().zip(&self.arrivals);
        members.find_map(|(slot, arrival)| Some((*slot, &arrival.as_ref()?.call)))
    }

    /// The member that waits for `slot`, if it is a member, and in what.
    fn waits_for(&self, slot: usize) -> Option<(usize, Arc<CollectiveCall>)> {
        let (waiting, call) = self.first().filter(|_| self.slots.contains(&slot))?;
        Some((waiting, Arc::clone(call)))
    }

    fn absent(&self) -> impl Iterator<Item = usize> {
        let members = self.slots.iter().zip(&self.arrivals);
        members.filter(|(_, arrival)| arrival.is_none()).map(|(slot, _)| *slot)
    }

    #[expect(clippy::expect_used, reason = "each arrival lowers `missing`, which is 0 here")]
    fn close(self) -> Arc<Contributions> {
        let tensors = |arrival: Option<Arrival>| arrival.expect("all members have come").tensors;
        let by_rank = self.arrivals.into_iter().map(tensors).collect();
        Arc::new(Contributions { by_rank, buffer: OnceLock::new() })
    }
}

impl Contributions {
    /// The one tensor that the member of this rank contributed.
    pub(super) fn first(&self, rank: usize) -> &Tensor {
        &self.by_rank[rank][0]
    }

    /// The one tensor of each member.
    pub(super) fn firsts(&self) -> Vec<Tensor> {
        self.by_rank.iter().map(|tensors| tensors[0].clone()).collect()
    }

    /// The one tensor that one of the members contributed, and the others none.
    #[expect(clippy::expect_used, reason = "one member of a reduction fills the last part")]
    pub(super) fn only(&self) -> &Tensor {
        self.by_rank.iter().flatten().next().expect("one member contributed the result")
    }

    /// The tensor number `index` of each member.
    pub(super) fn nths(&self, index: usize) -> candle_core::Result<Vec<Tensor>> {
        let nths: Option<_> = self.by_rank.iter().map(|list| list.get(index).cloned()).collect();
        nths.ok_or_else(|| candle_core::Error::msg(format!("there is no tensor {index} to sum")))
    }

    /// The buffer that the members fill together, made by the one that needs it first.
    pub(super) fn buffer(
        &self,
        make: impl FnOnce() -> candle_core::Result<Buffer>,
    ) -> candle_core::Result<&Buffer> {
        let buffer = self.buffer.get_or_init(|| make().map_err(|error| error.to_string()));
        buffer.as_ref().map_err(candle_core::Error::msg)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{axes::ALL, topology::Topology};

    #[test]
    fn a_second_thread_is_refused_until_the_first_has_left_its_collective() {
        let topology = Topology::new(vec![("a".into(), 2)], 2).unwrap();
        let site = |slot| Site::along(ALL, &topology, slot, "barrier", None).unwrap();
        let rendezvous = Rendezvous::new(2, None);
        // The group is complete, and nobody has taken the inbox of slot 0 yet.
        assert!(rendezvous.arrive(&site(0), Vec::new()).unwrap().is_none());
        assert!(rendezvous.arrive(&site(1), Vec::new()).unwrap().is_some());

        let error = rendezvous.arrive(&site(0), Vec::new()).unwrap_err().to_string();
        assert!(error.contains("replica 0 calls barrier"), "{error}");
        let failure = rendezvous.take_failure();
        assert!(
            matches!(
                failure,
                Some(Error::Collective(CollectiveError::Mismatch { left: 0, right: 0, .. }))
            ),
            "{failure:?}"
        );
    }

    #[test]
    fn a_replica_whose_group_is_complete_is_not_stuck() {
        let topology = Topology::new(vec![("a".into(), 2)], 2).unwrap();
        let site = |slot| Site::along(ALL, &topology, slot, "barrier", None).unwrap();
        let rendezvous = Rendezvous::new(2, None);
        rendezvous.arrive(&site(0), Vec::new()).unwrap();
        rendezvous.arrive(&site(1), Vec::new()).unwrap();
        // Slot 0 will come next, though slot 1 is there before it has taken its inbox.
        assert!(rendezvous.arrive(&site(1), Vec::new()).unwrap().is_none());
        assert!(rendezvous.take_failure().is_none());
    }
}
