//! How the replicas of one call meet: each waits until all of its group have come, or learns why
//! they will not.
//!
//! A replica comes to the collectives of a group in one order, and several of them may be under way
//! at a time: the n-th that each member comes to are one collective, whether they wait for it at
//! once or later. All groups of a call share one fate: a failure ends every wait, in whichever
//! collective.
//!
//! # Synchronization
//!
//! All that the replicas share lies in [`State`], under one lock, which is held for a few
//! instructions and never while waiting or while another lock is taken. A replica that waits does
//! not take it: it looks at `failed` and at the [`Exchange`] that it waits for, and sleeps
//! ([`sync::until`]). Both are set while the lock is held (of the exchange, what is made together
//! apart), with `Release`, after what they announce was written; they are read with `Acquire`, and
//! whoever has seen `failed` takes the lock and finds there what it announces. They are set before
//! the waiting thread is unparked, so that a replica that is just about to sleep finds either the
//! news or the permit of `unpark`.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt, mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use crate::{
    axes::AxisSet,
    engine::{
        Site,
        threads::exchange::{CollectiveKey, Contribution, Exchange, WorkPlanner},
    },
    error::{CollectiveError, Error, call::CollectiveCall},
    reduce::joint::SharedWork,
    sync::{self, lock},
};

/// Where the replicas of one call meet, all groups of the mesh.
#[derive(Debug)]
pub(super) struct Rendezvous {
    deadline: Option<Duration>,
    /// Whether `failures` is not empty. An atomic beside the locked state, because every replica
    /// that waits looks at it, many times before it sleeps.
    failed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The collectives to which some members of a group, but not all, have come.
    open: BTreeMap<CollectiveKey, OpenGroup>,
    /// What is known of each slot's replica.
    replicas: Vec<ReplicaState>,
    failures: Vec<(usize, Error)>,
}

#[derive(Default)]
struct ReplicaState {
    /// How many collectives it has come to along each set of axes.
    counts: BTreeMap<AxisSet, u64>,
    /// From when it begins to wait until its thread leaves, with the result or an error.
    waits_for: Option<Waiting>,
    /// The thread to be woken when there is news.
    thread: Option<Thread>,
    returned: bool,
    /// Whether it saw a peer fail; its own error is then secondary.
    aborted: bool,
}

/// A collective that a replica waits for.
struct Waiting {
    call: Arc<CollectiveCall>,
    /// Found among the open ones until all have come.
    key: CollectiveKey,
}

/// A collective to which some members have not come yet.
struct OpenGroup {
    /// The slots of the group, by rank.
    slots: Arc<[usize]>,
    /// What each member called and contributed, by rank.
    arrivals: Vec<Option<Arrival>>,
    missing: usize,
    exchange: Arc<Exchange>,
}

struct Arrival {
    call: Arc<CollectiveCall>,
    contribution: Contribution,
}

impl Rendezvous {
    pub(super) fn new(slots: usize, deadline: Option<Duration>) -> Self {
        let replicas = (0..slots).map(|_| ReplicaState::default()).collect();
        Self {
            deadline,
            failed: AtomicBool::new(false),
            state: Mutex::new(State { replicas, ..State::default() }),
        }
    }

    /// Contributes to a collective, and waits for the other members of the group; the last one lays
    /// out what they make together.
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
        contribution: Contribution,
        lay_out: Option<WorkPlanner<'_>>,
    ) -> candle_core::Result<Arc<Exchange>> {
        let (exchange, is_last) = self.come(site, contribution, lay_out, true)?;
        if !is_last {
            // Also if the others have come by now: it has begun to wait.
            self.wait(site, &exchange, || exchange.is_complete())?;
        }
        Ok(exchange)
    }

    /// Contributes to a collective that is waited for later.
    ///
    /// # Errors
    ///
    /// As [`meet`](Self::meet).
    pub(super) fn start(
        &self,
        site: &Site,
        contribution: Contribution,
        lay_out: WorkPlanner<'_>,
    ) -> candle_core::Result<Arc<Exchange>> {
        Ok(self.come(site, contribution, Some(lay_out), false)?.0)
    }

    /// Adds the replica to its group, and completes the exchange if it is the last one missing;
    /// returns whether it is. If it is not, it has begun to wait if it `waits`.
    fn come(
        &self,
        site: &Site,
        contribution: Contribution,
        lay_out: Option<WorkPlanner<'_>>,
        waits: bool,
    ) -> candle_core::Result<(Arc<Exchange>, bool)> {
        let mut state = lock(&self.state);
        let (exchange, contributions) = self.arrive(&mut state, site, contribution)?;
        let Some(contributions) = contributions else {
            if waits {
                self.begin_wait(&mut state, site, &exchange)?;
            }
            return Ok((exchange, false));
        };
        if lay_out.is_some() {
            // Not under the lock: this takes some microseconds.
            drop(state);
            exchange.complete(contributions, lay_out);
            state = lock(&self.state);
        } else {
            exchange.complete(contributions, None);
        }
        state.wake_others(site);
        Ok((exchange, true))
    }

    /// Waits until all have come to a collective that this replica has started.
    ///
    /// # Errors
    ///
    /// As [`meet`](Self::meet).
    pub(super) fn complete(
        &self,
        site: &Site,
        exchange: &Arc<Exchange>,
    ) -> candle_core::Result<()> {
        {
            let state = &mut *lock(&self.state);
            if exchange.is_complete() {
                return Ok(());
            }
            self.begin_wait_again(state, site, exchange)?;
        }
        self.wait(site, exchange, || exchange.is_complete())
    }

    /// Takes part in what the members of a complete collective make together, until it is finished.
    ///
    /// # Errors
    ///
    /// As [`meet`](Self::meet). That the work itself has failed, its results say.
    pub(super) fn work(
        &self,
        site: &Site,
        exchange: &Arc<Exchange>,
        work: &SharedWork,
    ) -> candle_core::Result<()> {
        if work.help(site.rank) {
            lock(&self.state).wake_others(site);
        }
        // The others are at their last pieces: mostly this spares the lock.
        if sync::soon(|| work.is_finished()) {
            return Ok(());
        }
        {
            let state = &mut *lock(&self.state);
            if work.is_finished() {
                return Ok(());
            }
            self.begin_wait_again(state, site, exchange)?;
        }
        self.wait(site, exchange, || work.is_finished())
    }

    /// Says that a replica waits which has come to the collective before; another of its threads
    /// may have begun to wait elsewhere since, and would never be woken if this one took its place.
    fn begin_wait_again(
        &self,
        state: &mut State,
        site: &Site,
        exchange: &Arc<Exchange>,
    ) -> candle_core::Result<()> {
        if self.failed.load(Ordering::Acquire) {
            return Err(state.abort(site.slot()));
        }
        if let Some(objection) = state.busy(site) {
            return Err(self.refuse(state, site.slot(), objection));
        }
        self.begin_wait(state, site, exchange)
    }

    /// Says that a replica waits, which may be what leaves none that does anything else.
    fn begin_wait(
        &self,
        state: &mut State,
        site: &Site,
        exchange: &Arc<Exchange>,
    ) -> candle_core::Result<()> {
        let replica = &mut state.replicas[site.slot()];
        let call = Arc::clone(&site.call);
        replica.waits_for = Some(Waiting { call, key: exchange.key() });
        replica.thread = Some(thread::current());
        self.check_progress(state, site.slot())
    }

    /// Waits until a replica that has begun to wait is `ready`.
    fn wait(
        &self,
        site: &Site,
        exchange: &Arc<Exchange>,
        ready: impl Fn() -> bool,
    ) -> candle_core::Result<()> {
        let slot = site.slot();
        // A deadline beyond all time is none.
        let deadline = self.deadline.and_then(|deadline| Instant::now().checked_add(deadline));
        // Pairs with the store in `end`.
        let in_time = sync::until(deadline, || ready() || self.failed.load(Ordering::Acquire));
        let mut state = lock(&self.state);
        state.replicas[slot].waits_for = None;
        if ready() {
            return Ok(());
        }
        match self.deadline {
            Some(after) if !in_time && state.failures.is_empty() => {
                let call = Arc::clone(&site.call);
                let missing = state.missing(exchange);
                let late = CollectiveError::Deadline { slot, missing, call, after };
                self.end(&mut state, slot, late.into());
            }
            _ => {}
        }
        Err(state.abort(slot))
    }

    /// Adds the replica to its group; returns what all have contributed if it is the last one
    /// missing.
    fn arrive(
        &self,
        state: &mut State,
        site: &Site,
        contribution: Contribution,
    ) -> candle_core::Result<(Arc<Exchange>, Option<Vec<Contribution>>)> {
        let slot = site.slot();
        // Under the lock, so no failure can be noted between this and the arrival.
        if self.failed.load(Ordering::Acquire) {
            return Err(state.abort(slot));
        }
        let key = state.next_key(site);
        if let Some(objection) = state.objection(site, key) {
            return Err(self.refuse(state, slot, objection));
        }
        let mut open = match state.open.entry(key) {
            Entry::Occupied(open) => open,
            Entry::Vacant(vacant) => vacant.insert_entry(OpenGroup::new(site, key)),
        };
        open.get_mut().add(site, contribution);
        if open.get().missing > 0 {
            return Ok((Arc::clone(&open.get().exchange), None));
        }
        let (exchange, contributions) = open.remove().close();
        Ok((exchange, Some(contributions)))
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
            self.end(state, slot, CollectiveError::PeerReturned { slot, waiting, call }.into());
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
    /// The collective that a replica comes to in a group.
    fn next_key(&mut self, site: &Site) -> CollectiveKey {
        let (set, group) = site.key();
        let count = self.replicas[site.slot()].counts.entry(set).or_default();
        *count += 1;
        (set, group, *count)
    }

    /// Why a replica cannot take part in a collective, if it cannot.
    fn objection(&self, site: &Site, key: CollectiveKey) -> Option<CollectiveError> {
        let slot = site.slot();
        let call = || Arc::clone(&site.call);
        if let Some(objection) = self.busy(site) {
            return Some(objection);
        }
        if self.replicas[slot].returned {
            return Some(CollectiveError::Ended { slot, call: call() });
        }
        if let Some(&gone) = site.members().iter().find(|&&slot| self.replicas[slot].returned) {
            return Some(CollectiveError::PeerReturned { slot: gone, waiting: slot, call: call() });
        }
        let first = self.open.get(&key)?.first()?;
        (!first.1.agrees_with(&site.call)).then(|| mismatch(first, site))
    }

    /// Refuses a second thread of a replica while the first one waits.
    fn busy(&self, site: &Site) -> Option<CollectiveError> {
        let slot = site.slot();
        let waiting = self.replicas[slot].waits_for.as_ref()?;
        Some(mismatch((slot, &waiting.call), site))
    }

    /// The deadlock, if there is one.
    fn deadlock(&self) -> Option<CollectiveError> {
        if !self.replicas.iter().all(|replica| self.is_stuck(replica)) {
            return None;
        }
        let waiting: Vec<_> = (self.replicas.iter().enumerate())
            .filter_map(|(slot, replica)| {
                Some((slot, Arc::clone(&replica.waits_for.as_ref()?.call)))
            })
            .collect();
        // If none waits, all have returned.
        (!waiting.is_empty()).then_some(CollectiveError::Deadlock { waiting })
    }

    /// Whether a replica does nothing more unless others come; who waits for a collective that all
    /// have come to is about to leave it, or waits for those who work.
    fn is_stuck(&self, replica: &ReplicaState) -> bool {
        let waits = |waiting: &Waiting| self.open.contains_key(&waiting.key);
        replica.returned || replica.waits_for.as_ref().is_some_and(waits)
    }

    /// The members that have not come to a collective; none if it is only not finished.
    fn missing(&self, exchange: &Exchange) -> Vec<usize> {
        let open = self.open.get(&exchange.key());
        open.into_iter().flat_map(OpenGroup::absent).collect()
    }

    /// Wakes the other members of a group that wait.
    fn wake_others(&self, site: &Site) {
        for &slot in site.members().iter().filter(|&&slot| slot != site.slot()) {
            self.replicas[slot].wake();
        }
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
    /// Wakes the replica if it has ever waited; one that is awake sleeps once less.
    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }
}

impl OpenGroup {
    fn new(site: &Site, key: CollectiveKey) -> Self {
        Self {
            slots: Arc::clone(site.members()),
            arrivals: (0..site.size()).map(|_| None).collect(),
            missing: site.size(),
            exchange: Arc::new(Exchange::new(key)),
        }
    }

    fn add(&mut self, site: &Site, contribution: Contribution) {
        self.arrivals[site.rank] = Some(Arrival { call: Arc::clone(&site.call), contribution });
        self.missing -= 1;
    }

    /// The member of the lowest rank that has come, and what it called.
    fn first(&self) -> Option<(usize, &Arc<CollectiveCall>)> {
        let mut members = self.slots.iter().zip(&self.arrivals);
        members.find_map(|(slot, arrival)| Some((*slot, &arrival.as_ref()?.call)))
    }

    /// The member that waits for `slot`, if it is a member that has not come, and in what.
    fn waits_for(&self, slot: usize) -> Option<(usize, Arc<CollectiveCall>)> {
        let (waiting, call) =
            self.first().filter(|_| self.absent().any(|absent| absent == slot))?;
        Some((waiting, Arc::clone(call)))
    }

    fn absent(&self) -> impl Iterator<Item = usize> {
        let members = self.slots.iter().zip(&self.arrivals);
        members.filter(|(_, arrival)| arrival.is_none()).map(|(slot, _)| *slot)
    }

    #[expect(clippy::expect_used, reason = "each arrival lowers `missing`, which is 0 here")]
    fn close(self) -> (Arc<Exchange>, Vec<Contribution>) {
        let contribution =
            |arrival: Option<Arrival>| arrival.expect("all members have come").contribution;
        (self.exchange, self.arrivals.into_iter().map(contribution).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{axes::ALL, grid::Topology, reduce::joint::Output};

    fn site(slot: usize) -> Site {
        let topology = Topology::new(vec![("a".into(), 2)], 2).unwrap();
        Site::along(ALL, &topology, slot, "barrier", None).unwrap()
    }

    /// As a replica that starts a collective, or as one whose thread is about to wait.
    fn comes(
        rendezvous: &Rendezvous,
        slot: usize,
        waits: bool,
    ) -> candle_core::Result<Arc<Exchange>> {
        Ok(rendezvous.come(&site(slot), Contribution::default(), None, waits)?.0)
    }

    fn begins(rendezvous: &Rendezvous, slot: usize) -> candle_core::Result<Arc<Exchange>> {
        comes(rendezvous, slot, true)
    }

    #[test]
    fn a_second_thread_is_refused_until_the_first_has_left_its_collective() {
        let rendezvous = Rendezvous::new(2, None);
        // The group is complete, and slot 0 has not left yet.
        assert!(!begins(&rendezvous, 0).unwrap().is_complete());
        assert!(begins(&rendezvous, 1).unwrap().is_complete());

        let error = begins(&rendezvous, 0).unwrap_err().to_string();
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
    fn a_second_thread_is_refused_at_the_work_of_its_collective_too() {
        // With a deadline, so that a wait that is not refused ends.
        let rendezvous = Rendezvous::new(2, Some(Duration::from_millis(50)));
        begins(&rendezvous, 1).unwrap();
        let exchange = comes(&rendezvous, 0, false).unwrap();
        begins(&rendezvous, 0).unwrap();

        // A piece that another member has taken, and has not made.
        let work = SharedWork::new(vec![Output::new(1, |_| Ok(None))], 2);
        rendezvous.work(&site(0), &exchange, &work).unwrap_err();
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
        let rendezvous = Rendezvous::new(2, None);
        begins(&rendezvous, 0).unwrap();
        begins(&rendezvous, 1).unwrap();
        // Slot 0 will come next, though slot 1 is there before it has left.
        assert!(!begins(&rendezvous, 1).unwrap().is_complete());
        assert!(rendezvous.take_failure().is_none());
    }

    #[test]
    fn collectives_under_way_are_matched_in_the_order_in_which_they_are_started() {
        let rendezvous = Rendezvous::new(2, None);
        let of_first = [0; 3].map(|slot| comes(&rendezvous, slot, false).unwrap());
        let of_second = [1; 2].map(|slot| comes(&rendezvous, slot, false).unwrap());
        for (left, right) in of_first.iter().zip(&of_second) {
            assert!(Arc::ptr_eq(left, right) && left.is_complete());
        }
        assert!(!of_first[2].is_complete());
    }

    #[test]
    fn who_comes_after_its_function_has_returned_is_told_so() {
        let rendezvous = Rendezvous::new(2, None);
        rendezvous.finish(0);
        begins(&rendezvous, 0).unwrap_err();
        let failure = rendezvous.take_failure();
        assert!(
            matches!(failure, Some(Error::Collective(CollectiveError::Ended { slot: 0, .. }))),
            "{failure:?}"
        );
    }
}
