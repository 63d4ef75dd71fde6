//! The rendezvous of one call's replicas: each replica waits until all members of its group have
//! arrived, or until the call has failed.
//!
//! The members of a group make their collectives in the same order, so the n-th collective of each
//! member is the same collective, whether the member waits for it at once or later. Several
//! collectives of a group may be pending. All groups of a call fail together: a failure ends every
//! wait.
//!
//! # Synchronization
//!
//! All shared state is in [`RendezvousState`], under one lock, which is held for a few instructions
//! and never while waiting or taking another lock. A waiting replica does not take the lock: it
//! reads `failed` and its [`GroupExchange`], and sleeps ([`sync::wait_until`]). `failed` and the
//! exchange are set with `Release` after the data that they announce, and read with `Acquire`. A
//! replica that has read `failed` takes the lock and finds the failure in the state. Both are set
//! before the waiting thread is unparked, so that a replica that is about to sleep sees either the
//! change or the permit of `unpark`.

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
        GroupContext,
        threads::exchange::{CollectiveKey, Contribution, GroupExchange, WorkPlanner},
    },
    error::{CollectiveError, Error, call::CollectiveCall},
    reduce::shared_work::SharedWork,
    sync::{self, lock},
};

/// The rendezvous of one call's replicas, for all groups of the mesh.
#[derive(Debug)]
pub(super) struct Rendezvous {
    deadline: Option<Duration>,
    /// Whether `failures` is not empty. This flag is outside of the lock, because every waiting
    /// replica polls it many times before it sleeps.
    failed: AtomicBool,
    state: Mutex<RendezvousState>,
}

#[derive(Default)]
struct RendezvousState {
    /// The collectives that some members of their group have not reached yet.
    open: BTreeMap<CollectiveKey, OpenCollective>,
    /// The state of each slot's replica.
    replicas: Vec<ReplicaState>,
    /// The errors that ended the call, each with the slot of its replica.
    failures: Vec<(usize, Error)>,
}

#[derive(Default)]
struct ReplicaState {
    /// The number of collectives that the replica has reached along each set of axes.
    counts: BTreeMap<AxisSet, u64>,
    /// The collective that the replica waits for. It is set until the waiting thread leaves with
    /// the result or an error.
    waits_for: Option<PendingWait>,
    /// The thread to wake.
    thread: Option<Thread>,
    has_returned: bool,
    /// Whether the replica has been told that a peer failed; its own error is then secondary.
    is_aborted: bool,
}

/// The collective that a replica waits for.
struct PendingWait {
    call: Arc<CollectiveCall>,
    /// The key of the collective in `open`, until all members have arrived.
    key: CollectiveKey,
}

/// A collective that some members have not reached yet.
struct OpenCollective {
    /// The slots of the group, by rank.
    slots: Arc<[usize]>,
    /// The call and contribution of each member, by rank.
    arrivals: Vec<Option<MemberArrival>>,
    n_missing: usize,
    exchange: Arc<GroupExchange>,
}

struct MemberArrival {
    call: Arc<CollectiveCall>,
    contribution: Contribution,
}

impl Rendezvous {
    pub(super) fn new(slots: usize, deadline: Option<Duration>) -> Self {
        let replicas = (0..slots).map(|_| ReplicaState::default()).collect();
        Self {
            deadline,
            failed: AtomicBool::new(false),
            state: Mutex::new(RendezvousState { replicas, ..RendezvousState::default() }),
        }
    }

    /// Contributes to a collective and waits for the other members of the group. The last member to
    /// arrive plans the shared work.
    ///
    /// No member leaves a collective before all members have arrived. So once a member has left the
    /// next collective, all other members have left this one, and the tensors that the member has
    /// contributed to this one may change.
    ///
    /// # Errors
    ///
    /// The message of the failure; [`take_failure`](Self::take_failure) returns the error.
    pub(super) fn contribute_and_wait(
        &self,
        ctx: &GroupContext,
        contribution: Contribution,
        plan: Option<WorkPlanner<'_>>,
    ) -> candle_core::Result<Arc<GroupExchange>> {
        let waits = true;
        let (exchange, is_last) = self.join(ctx, contribution, plan, waits)?;
        if !is_last {
            // Wait even if all members have arrived by now, because `wait` removes the mark of this
            // replica as waiting.
            self.wait(ctx, &exchange, || exchange.is_complete())?;
        }
        Ok(exchange)
    }

    /// Contributes to a collective that the replica will wait for later.
    ///
    /// # Errors
    ///
    /// The errors of [`contribute_and_wait`](Self::contribute_and_wait).
    pub(super) fn contribute(
        &self,
        ctx: &GroupContext,
        contribution: Contribution,
        plan: WorkPlanner<'_>,
    ) -> candle_core::Result<Arc<GroupExchange>> {
        let waits = false;
        let (exchange, _) = self.join(ctx, contribution, Some(plan), waits)?;
        Ok(exchange)
    }

    /// Adds the replica's contribution to its group's collective. If the replica is the last member
    /// to arrive, completes the exchange and returns true with it. Otherwise, if `waits`, marks the
    /// replica as waiting.
    fn join(
        &self,
        ctx: &GroupContext,
        contribution: Contribution,
        plan: Option<WorkPlanner<'_>>,
        waits: bool,
    ) -> candle_core::Result<(Arc<GroupExchange>, bool)> {
        let mut state = lock(&self.state);
        let (exchange, contributions) = self.arrive(&mut state, ctx, contribution)?;
        let Some(contributions) = contributions else {
            if waits {
                self.mark_waiting(&mut state, ctx, &exchange)?;
            }
            return Ok((exchange, false));
        };
        if plan.is_some() {
            // Release the lock, since planning takes some microseconds.
            drop(state);
            exchange.complete(contributions, plan);
            state = lock(&self.state);
        } else {
            exchange.complete(contributions, None);
        }
        state.wake_others(ctx);
        Ok((exchange, true))
    }

    /// Waits until all members have reached a collective to which this replica has contributed.
    ///
    /// # Errors
    ///
    /// The errors of [`contribute_and_wait`](Self::contribute_and_wait).
    pub(super) fn wait_for_members(
        &self,
        ctx: &GroupContext,
        exchange: &Arc<GroupExchange>,
    ) -> candle_core::Result<()> {
        let mut state = lock(&self.state);
        if exchange.is_complete() {
            return Ok(());
        }
        self.mark_waiting_again(&mut state, ctx, exchange)?;
        drop(state);
        self.wait(ctx, exchange, || exchange.is_complete())
    }

    /// Takes part in the shared work of a complete collective, until the work is finished.
    ///
    /// # Errors
    ///
    /// The errors of [`contribute_and_wait`](Self::contribute_and_wait). If the work fails, its
    /// results return the error.
    pub(super) fn finish_work(
        &self,
        ctx: &GroupContext,
        exchange: &Arc<GroupExchange>,
        work: &SharedWork,
    ) -> candle_core::Result<()> {
        if work.run_chunks(ctx.rank) {
            lock(&self.state).wake_others(ctx);
        }
        // Other members may still compute their last chunks. A short wait usually avoids the lock.
        if sync::yield_until(|| work.is_finished()) {
            return Ok(());
        }
        let mut state = lock(&self.state);
        if work.is_finished() {
            return Ok(());
        }
        self.mark_waiting_again(&mut state, ctx, exchange)?;
        drop(state);
        self.wait(ctx, exchange, || work.is_finished())
    }

    /// Marks a replica as waiting for an earlier collective. Fails if another thread of the replica
    /// waits: that thread would never be woken if this one replaced it.
    fn mark_waiting_again(
        &self,
        state: &mut RendezvousState,
        ctx: &GroupContext,
        exchange: &Arc<GroupExchange>,
    ) -> candle_core::Result<()> {
        if self.failed.load(Ordering::Acquire) {
            return Err(state.aborted_error(ctx.slot()));
        }
        if let Some(error) = state.busy_error(ctx) {
            return Err(self.reject(state, ctx.slot(), error));
        }
        self.mark_waiting(state, ctx, exchange)
    }

    /// Marks a replica as waiting, and checks for a deadlock, since it may have been the last
    /// running replica.
    fn mark_waiting(
        &self,
        state: &mut RendezvousState,
        ctx: &GroupContext,
        exchange: &Arc<GroupExchange>,
    ) -> candle_core::Result<()> {
        let replica = &mut state.replicas[ctx.slot()];
        let call = Arc::clone(&ctx.call);
        replica.waits_for = Some(PendingWait { call, key: exchange.key() });
        replica.thread = Some(thread::current());
        self.check_progress(state, ctx.slot())
    }

    /// Waits until `ready` returns true, for a replica that is marked as waiting. Then removes the
    /// mark.
    fn wait(
        &self,
        ctx: &GroupContext,
        exchange: &Arc<GroupExchange>,
        ready: impl Fn() -> bool,
    ) -> candle_core::Result<()> {
        let slot = ctx.slot();
        // There is no deadline if it overflows.
        let deadline = self.deadline.and_then(|deadline| Instant::now().checked_add(deadline));
        // Pairs with the store in `record_failure`.
        let in_time = sync::wait_until(deadline, || ready() || self.failed.load(Ordering::Acquire));
        let mut state = lock(&self.state);
        state.replicas[slot].waits_for = None;
        if ready() {
            return Ok(());
        }
        if let Some(limit) = self.deadline
            && !in_time
            && state.failures.is_empty()
        {
            let call = ctx.call.to_string();
            let missing = state.missing_members(exchange);
            let late = CollectiveError::Deadline { slot, missing, call, limit };
            self.record_failure(&mut state, slot, late.into());
        }
        Err(state.aborted_error(slot))
    }

    /// Adds the replica's contribution to its group's collective. Returns the exchange, and all
    /// contributions if the replica is the last member to arrive.
    fn arrive(
        &self,
        state: &mut RendezvousState,
        ctx: &GroupContext,
        contribution: Contribution,
    ) -> candle_core::Result<(Arc<GroupExchange>, Option<Vec<Contribution>>)> {
        let slot = ctx.slot();
        // The caller holds the lock, so no failure can be recorded between this check and the
        // arrival.
        if self.failed.load(Ordering::Acquire) {
            return Err(state.aborted_error(slot));
        }
        let key = state.next_key(ctx);
        if let Some(error) = state.call_error(ctx, key) {
            return Err(self.reject(state, slot, error));
        }
        let mut open = match state.open.entry(key) {
            Entry::Occupied(open) => open,
            Entry::Vacant(vacant) => vacant.insert_entry(OpenCollective::new(ctx, key)),
        };
        open.get_mut().add(ctx, contribution);
        if open.get().n_missing > 0 {
            return Ok((Arc::clone(&open.get().exchange), None));
        }
        let (exchange, contributions) = open.remove().close();
        Ok((exchange, Some(contributions)))
    }

    /// Records that a replica has returned, and fails the call if another replica waits for it.
    pub(super) fn finish(&self, slot: usize) {
        let mut state = lock(&self.state);
        state.replicas[slot].has_returned = true;
        if !state.failures.is_empty() {
            // The waiting replicas already see the earlier failure.
            return;
        }
        if let Some((waiting, call)) = state.open.values().find_map(|open| open.waiting_for(slot)) {
            let call = call.to_string();
            let error = CollectiveError::PeerReturned { slot, waiting, call };
            self.record_failure(&mut state, slot, error.into());
        } else {
            // This replica has returned, so it cannot get the error; the failure wakes the others.
            drop(self.check_progress(&mut state, slot));
        }
    }

    /// Fails the call for all replicas because of an error of the replica in `slot`, unless another
    /// replica's failure caused this error.
    pub(super) fn fail(&self, slot: usize, error: Error) {
        let mut state = lock(&self.state);
        if !state.replicas[slot].is_aborted {
            self.record_failure(&mut state, slot, error);
        }
    }

    /// Returns true if a deadline has ended the call.
    pub(super) fn deadline_passed(&self) -> bool {
        let failures = &lock(&self.state).failures;
        failures
            .iter()
            .any(|(_, error)| matches!(error, Error::Collective(CollectiveError::Deadline { .. })))
    }

    /// Takes the errors that ended the call, and returns the error of the lowest slot, if any.
    pub(super) fn take_failure(&self) -> Option<Error> {
        let failures = mem::take(&mut lock(&self.state).failures);
        failures.into_iter().min_by_key(|(slot, _)| *slot).map(|(_, error)| error)
    }

    /// Fails the call if no replica can continue.
    fn check_progress(&self, state: &mut RendezvousState, slot: usize) -> candle_core::Result<()> {
        match state.deadlock() {
            None => Ok(()),
            Some(deadlock) => Err(self.reject(state, slot, deadlock)),
        }
    }

    /// Fails the call for all replicas. Returns the error for the replica that detected the
    /// failure.
    fn reject(
        &self,
        state: &mut RendezvousState,
        slot: usize,
        error: CollectiveError,
    ) -> candle_core::Error {
        self.record_failure(state, slot, error.into());
        state.aborted_error(slot)
    }

    fn record_failure(&self, state: &mut RendezvousState, slot: usize, error: Error) {
        state.failures.push((slot, error));
        // Set the flag after recording the failure and before waking the threads. The store pairs
        // with the load in `wait`.
        self.failed.store(true, Ordering::Release);
        state.replicas.iter().for_each(ReplicaState::wake);
    }
}

impl RendezvousState {
    /// Counts a new collective of a replica in a group, and returns its key.
    fn next_key(&mut self, ctx: &GroupContext) -> CollectiveKey {
        let (set, group) = ctx.key();
        let count = self.replicas[ctx.slot()].counts.entry(set).or_default();
        *count += 1;
        (set, group, *count)
    }

    /// Returns the reason why a replica cannot take part in a collective, if any.
    fn call_error(&self, ctx: &GroupContext, key: CollectiveKey) -> Option<CollectiveError> {
        let slot = ctx.slot();
        let call = || ctx.call.to_string();
        if let Some(error) = self.busy_error(ctx) {
            return Some(error);
        }
        if self.replicas[slot].has_returned {
            return Some(CollectiveError::Ended { slot, call: call() });
        }
        if let Some(&peer) = ctx.members().iter().find(|&&slot| self.replicas[slot].has_returned) {
            return Some(CollectiveError::PeerReturned { slot: peer, waiting: slot, call: call() });
        }
        let (first_slot, first_call) = self.open.get(&key)?.first_arrival()?;
        let agrees = first_call.agrees_with(&ctx.call);
        (!agrees).then(|| mismatch((first_slot, first_call), ctx))
    }

    /// Returns an error if another thread of the replica waits in a collective.
    fn busy_error(&self, ctx: &GroupContext) -> Option<CollectiveError> {
        let slot = ctx.slot();
        let wait = self.replicas[slot].waits_for.as_ref()?;
        Some(mismatch((slot, &wait.call), ctx))
    }

    /// Returns the deadlock, if there is one.
    fn deadlock(&self) -> Option<CollectiveError> {
        if !self.replicas.iter().all(|replica| self.is_stuck(replica)) {
            return None;
        }
        let waiting: Vec<_> = (self.replicas.iter().enumerate())
            .filter_map(|(slot, replica)| {
                Some((slot, replica.waits_for.as_ref()?.call.to_string()))
            })
            .collect();
        // If no replica waits, all have returned.
        (!waiting.is_empty()).then_some(CollectiveError::Deadlock { waiting })
    }

    /// Returns true if a replica has returned, or cannot continue before other replicas arrive. A
    /// replica that waits in a complete collective can continue: it is about to leave, or waits for
    /// members that compute.
    fn is_stuck(&self, replica: &ReplicaState) -> bool {
        let waits_for = replica.waits_for.as_ref();
        replica.has_returned || waits_for.is_some_and(|wait| self.open.contains_key(&wait.key))
    }

    /// Returns the members that have not reached a collective.
    fn missing_members(&self, exchange: &GroupExchange) -> Vec<usize> {
        let open = self.open.get(&exchange.key());
        open.into_iter().flat_map(OpenCollective::absent_slots).collect()
    }

    /// Wakes the waiting members of a group, except this one.
    fn wake_others(&self, ctx: &GroupContext) {
        for &slot in ctx.members().iter().filter(|&&slot| slot != ctx.slot()) {
            self.replicas[slot].wake();
        }
    }

    /// Marks a replica as aborted, and returns its error for a call that has failed.
    fn aborted_error(&mut self, slot: usize) -> candle_core::Error {
        self.replicas[slot].is_aborted = true;
        match self.failures.first() {
            Some((failed_slot, error)) => candle_core::Error::wrap(CollectiveError::Aborted {
                slot: *failed_slot,
                cause: error.to_string(),
            }),
            // The failure was taken at the end of the call, and this thread outlived its replica.
            None => candle_core::Error::msg("the call has ended"),
        }
    }
}

fn mismatch(
    (left, left_call): (usize, &Arc<CollectiveCall>),
    right: &GroupContext,
) -> CollectiveError {
    CollectiveError::Mismatch {
        left,
        left_call: left_call.to_string(),
        right: right.slot(),
        right_call: right.call.to_string(),
    }
}

impl fmt::Debug for RendezvousState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RendezvousState").field("failures", &self.failures).finish_non_exhaustive()
    }
}

impl ReplicaState {
    /// Wakes the replica, if it has ever waited. If the replica is awake, its next sleep returns
    /// early.
    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }
}

impl OpenCollective {
    fn new(ctx: &GroupContext, key: CollectiveKey) -> Self {
        Self {
            slots: Arc::clone(ctx.members()),
            arrivals: (0..ctx.size()).map(|_| None).collect(),
            n_missing: ctx.size(),
            exchange: Arc::new(GroupExchange::new(key)),
        }
    }

    fn add(&mut self, ctx: &GroupContext, contribution: Contribution) {
        self.arrivals[ctx.rank] = Some(MemberArrival { call: Arc::clone(&ctx.call), contribution });
        self.n_missing -= 1;
    }

    /// Returns the member of the lowest rank among those that have arrived, and its call.
    fn first_arrival(&self) -> Option<(usize, &Arc<CollectiveCall>)> {
        let mut members = self.slots.iter().zip(&self.arrivals);
        members.find_map(|(slot, arrival)| Some((*slot, &arrival.as_ref()?.call)))
    }

    /// Returns the first member that waits for `slot`, and its call, if `slot` is a member that has
    /// not arrived.
    fn waiting_for(&self, slot: usize) -> Option<(usize, Arc<CollectiveCall>)> {
        if !self.absent_slots().any(|absent| absent == slot) {
            return None;
        }
        let (waiting, call) = self.first_arrival()?;
        Some((waiting, Arc::clone(call)))
    }

    /// Returns the slots of the members that have not arrived.
    fn absent_slots(&self) -> impl Iterator<Item = usize> {
        let members = self.slots.iter().zip(&self.arrivals);
        members.filter(|(_, arrival)| arrival.is_none()).map(|(slot, _)| *slot)
    }

    /// Returns the exchange, and the contributions by rank, after all members have arrived.
    #[expect(clippy::expect_used, reason = "each arrival lowers `n_missing`, which is 0 by now")]
    fn close(self) -> (Arc<GroupExchange>, Vec<Contribution>) {
        let arrivals = self.arrivals.into_iter();
        let contributions =
            arrivals.map(|arrival| arrival.expect("all members have arrived").contribution);
        (self.exchange, contributions.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{axes::ALL, grid::Topology, reduce::shared_work::SharedOutput};

    fn ctx(slot: usize) -> GroupContext {
        let topology = Topology::new(vec![("a".into(), 2)], 2).unwrap();
        GroupContext::new(ALL, &topology, slot, "barrier", None).unwrap()
    }

    /// Joins a collective as a replica that starts it, or as one about to wait.
    fn join_as(
        rendezvous: &Rendezvous,
        slot: usize,
        waits: bool,
    ) -> candle_core::Result<Arc<GroupExchange>> {
        Ok(rendezvous.join(&ctx(slot), Contribution::default(), None, waits)?.0)
    }

    fn join_waiting(
        rendezvous: &Rendezvous,
        slot: usize,
    ) -> candle_core::Result<Arc<GroupExchange>> {
        join_as(rendezvous, slot, true)
    }

    #[test]
    fn second_thread_is_rejected_during_shared_work() {
        // Set a deadline, so that a wait that is not rejected ends.
        let rendezvous = Rendezvous::new(2, Some(Duration::from_millis(50)));
        join_waiting(&rendezvous, 1).unwrap();
        let exchange = join_as(&rendezvous, 0, false).unwrap();
        join_waiting(&rendezvous, 0).unwrap();

        // The only chunk yields no result, as if another member had not computed its chunk yet.
        let work = SharedWork::new(vec![SharedOutput::new(1, |_| Ok(None))], 2);
        rendezvous.finish_work(&ctx(0), &exchange, &work).unwrap_err();
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
    fn replica_in_complete_group_is_not_stuck() {
        let rendezvous = Rendezvous::new(2, None);
        join_waiting(&rendezvous, 0).unwrap();
        join_waiting(&rendezvous, 1).unwrap();
        // Slot 1 begins the next collective before slot 0 has left this one.
        assert!(!join_waiting(&rendezvous, 1).unwrap().is_complete());
        assert!(rendezvous.take_failure().is_none());
    }

    #[test]
    fn collective_after_return_is_an_error() {
        let rendezvous = Rendezvous::new(2, None);
        rendezvous.finish(0);
        join_waiting(&rendezvous, 0).unwrap_err();
        let failure = rendezvous.take_failure();
        assert!(
            matches!(failure, Some(Error::Collective(CollectiveError::Ended { slot: 0, .. }))),
            "{failure:?}"
        );
    }
}
