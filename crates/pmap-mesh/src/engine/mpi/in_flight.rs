//! Collectives on lists of tensors that run in the background while this process computes.
//!
//! Requests own the send and receive buffers, so the buffers live as long as MPI may access them,
//! even if the replica ends. Every call into MPI advances all collectives in flight. No second
//! thread calls MPI for this: MPI would need locks, which slow down every message (ADR 17).

use std::{collections::BTreeMap, fmt::Display, mem, sync::atomic::Ordering};

use candle_core::{Result, Tensor, bail};
use ferrompi::Communicator;

use super::{
    Mpi, MpiInner,
    backoff::{TransferProgress, WaitBackoff},
    header::{FIRST_BYTES, MemberHeader},
    messages::OwnedMessages,
    rounds::MpiRound,
    session::exit_all,
    stream::ChunkStream,
    transfer::{MAX_REQUESTS, MessageKind, POLLS},
};
use crate::{
    axes::AxisSet,
    engine::{
        self, GroupContext,
        processes::{TEXT_BYTES, call_hash, description, disagreement},
    },
    sync::lock,
};

/// The first tag for data. [`MessageKind`] uses the tags below.
const FIRST_TAG: i32 = 16;
/// The number of tags before they repeat in a group; MPI guarantees 32,767 tags. No two collectives
/// in flight share a tag: each needs at least two requests, and at most [`MAX_REQUESTS`] are
/// allowed.
const N_TAGS: u64 = 8192;

/// A collective in flight, in one of this process's groups.
struct InFlightCollective {
    ticket: u64,
    ctx: GroupContext,
    set: AxisSet,
    /// The tag of the data.
    tag: i32,
    stage: CollectiveStage,
}

enum CollectiveStage {
    /// Exchange of headers, to check that all members have started the same collective.
    Headers {
        messages: OwnedMessages,
        own: MemberHeader,
        /// The tensors that all members must pass with equal dtypes and shapes.
        tensors: Vec<Tensor>,
        round: Box<dyn MpiRound>,
    },
    /// Exchange of descriptions, since the headers of rank 0 and of rank `other` do not agree.
    Texts {
        messages: OwnedMessages,
        /// The inline data that did not fit the headers' messages. A member that called a different
        /// collective sends its description only after this rank has received its data.
        rests: OwnedMessages,
        /// The description of this rank's call.
        own: Vec<u8>,
        other: usize,
    },
    /// The round of data.
    Data {
        stream: ChunkStream,
        round: Box<dyn MpiRound>,
    },
    Over(Results),
}

type Results = Result<Vec<Tensor>>;

impl CollectiveStage {
    /// Returns a stage that stands in for the real one until that is known.
    fn placeholder() -> Self {
        Self::Over(Ok(Vec::new()))
    }
}

/// This process's collectives in flight, in the order of their start.
#[derive(Default)]
pub(super) struct InFlightList {
    list: Vec<InFlightCollective>,
    next_ticket: u64,
    /// The number of collectives started in the group along each set of axes.
    n_started: BTreeMap<AxisSet, u64>,
}

impl InFlightList {
    #[expect(clippy::expect_used, reason = "each ticket is waited for once")]
    fn position(&self, ticket: u64) -> usize {
        let position = self.list.iter().position(|entry| entry.ticket == ticket);
        position.expect("a collective is listed until the wait for it has ended")
    }
}

/// The handle of a started collective.
#[derive(Debug)]
pub(super) struct MpiHandle {
    mpi: Mpi,
    ctx: GroupContext,
    ticket: u64,
}

impl engine::PendingCollective for MpiHandle {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        let engine = &*self.mpi.0;
        let _guard = engine.current.enter(&self.ctx)?;
        engine.wait_for(&self.ctx, self.ticket)
    }
}

impl Mpi {
    /// Starts a collective: sends the headers now, and the data after all members' headers have
    /// arrived. All members must pass the same dtypes and shapes.
    pub(super) fn start_collective(
        &self,
        ctx: &GroupContext,
        tensors: &[Tensor],
        round: Box<dyn MpiRound>,
    ) -> Result<MpiHandle> {
        let engine = &*self.0;
        let _guard = engine.current.enter(ctx)?;
        engine.check_request_budget(ctx)?;
        let ticket = engine.start_with_headers(ctx, tensors, round);
        Ok(MpiHandle { mpi: self.clone(), ctx: ctx.clone(), ticket })
    }

    /// Runs a collective to its end. The budget of requests is not checked, because a running call
    /// may use [`MAX_REQUESTS`] in addition to the collectives in flight.
    pub(super) fn run_collective(
        &self,
        ctx: &GroupContext,
        tensors: &[Tensor],
        round: Box<dyn MpiRound>,
    ) -> Result<Vec<Tensor>> {
        let engine = &*self.0;
        let _guard = engine.current.enter(ctx)?;
        let ticket = engine.start_with_headers(ctx, tensors, round);
        engine.wait_for(ctx, ticket)
    }
}

impl MpiInner {
    /// Rejects a collective if its requests and those in flight would exceed [`MAX_REQUESTS`].
    fn check_request_budget(&self, ctx: &GroupContext) -> Result<()> {
        let n_requests = |ctx: &GroupContext| 2 * (ctx.size() - 1);
        let in_flight = lock(&self.in_flight);
        let n_used: usize = in_flight.list.iter().map(|entry| n_requests(&entry.ctx)).sum();
        if n_used + n_requests(ctx) > MAX_REQUESTS {
            bail!(
                "{} collectives are in flight already, with {n_used} of at most {MAX_REQUESTS} messages; \
                 wait for some of them",
                in_flight.list.len()
            );
        }
        Ok(())
    }

    /// Starts a collective with the exchange of its headers. Returns the collective's ticket.
    fn start_with_headers(
        &self,
        ctx: &GroupContext,
        tensors: &[Tensor],
        round: Box<dyn MpiRound>,
    ) -> u64 {
        let own = MemberHeader::without_data(call_hash(&ctx.call, tensors));
        let ticket = self.add_entry(ctx, |entry| {
            let messages = OwnedMessages::start(
                entry.comm(self),
                MessageKind::Header as i32,
                entry.others().map(|from| (from, FIRST_BYTES)),
                entry.others().map(|to| (to, own.encode())),
            );
            let messages = self.or_exit(ctx, messages);
            CollectiveStage::Headers { messages, own, tensors: tensors.to_vec(), round }
        });
        self.progress();
        ticket
    }

    #[expect(clippy::expect_used, reason = "tags are below `FIRST_TAG + N_TAGS`")]
    /// Adds a collective to the list, in the stage that `start_stage` starts. Returns its ticket.
    fn add_entry(
        &self,
        ctx: &GroupContext,
        start_stage: impl FnOnce(&InFlightCollective) -> CollectiveStage,
    ) -> u64 {
        let mut in_flight = lock(&self.in_flight);
        let set = self.topology.axes_longer_than_one() & ctx.call.axis_set;
        let count = in_flight.n_started.entry(set).or_default();
        // Members start collectives in the same order, so a collective has the same tag on all of
        // them.
        let tag = FIRST_TAG + i32::try_from(*count % N_TAGS).expect("a tag fits");
        *count += 1;
        let ticket = in_flight.next_ticket;
        in_flight.next_ticket += 1;
        let stage = CollectiveStage::placeholder();
        let mut entry = InFlightCollective { ticket, ctx: ctx.clone(), set, tag, stage };
        entry.stage = start_stage(&entry);
        in_flight.list.push(entry);
        // `Relaxed` suffices: another thread reads the count only after it has taken a lock in
        // `CurrentCall::enter` that this thread has released.
        self.n_in_flight.store(in_flight.list.len(), Ordering::Relaxed);
        ticket
    }

    /// Advances all collectives in flight without waiting.
    pub(super) fn progress(&self) -> TransferProgress {
        let mut progress = TransferProgress::default();
        if self.n_in_flight.load(Ordering::Relaxed) > 0 {
            for entry in &mut lock(&self.in_flight).list {
                progress.has_moved |= entry.advance(self);
                progress.is_moving |= entry.is_moving();
            }
        }
        progress
    }

    /// Waits for a started collective, and returns its results. Ends all processes at the deadline.
    fn wait_for(&self, ctx: &GroupContext, ticket: u64) -> Results {
        let mut backoff = WaitBackoff::new(self.deadline);
        loop {
            let mut progress = TransferProgress::default();
            for _ in 0..POLLS {
                progress = progress.then(self.progress());
                if let Some(results) = self.take_results(ticket) {
                    return results;
                }
            }
            self.pause(ctx, &mut backoff, progress, || self.unfinished_ranks(ticket));
        }
    }

    /// Removes a collective from the list and returns its results; returns `None` while it runs.
    fn take_results(&self, ticket: u64) -> Option<Results> {
        let mut in_flight = lock(&self.in_flight);
        let position = in_flight.position(ticket);
        let CollectiveStage::Over(results) = &mut in_flight.list[position].stage else {
            return None;
        };
        let results = mem::replace(results, Ok(Vec::new()));
        in_flight.list.remove(position);
        // `Relaxed` suffices for the reason in `add_entry`.
        self.n_in_flight.store(in_flight.list.len(), Ordering::Relaxed);
        Some(results)
    }

    /// Returns the ranks that a collective waits for.
    fn unfinished_ranks(&self, ticket: u64) -> Vec<usize> {
        let in_flight = lock(&self.in_flight);
        in_flight.list[in_flight.position(ticket)].unfinished_ranks()
    }

    /// Returns the value of a result. Ends all processes on an error, because started messages
    /// cannot be cancelled.
    pub(super) fn or_exit<T, E: Display>(
        &self,
        ctx: &GroupContext,
        result: std::result::Result<T, E>,
    ) -> T {
        match result {
            Ok(value) => value,
            Err(error) => exit_all(&self.session.world, &format!("{error} in {}", ctx.call)),
        }
    }
}

impl InFlightCollective {
    /// Advances the data, and enters the next stage after each complete one. Returns true if
    /// anything has moved.
    fn advance(&mut self, engine: &MpiInner) -> bool {
        let mut has_moved = self.advance_data(engine);
        while self.is_stage_complete(engine) {
            let stage = mem::replace(&mut self.stage, CollectiveStage::placeholder());
            self.stage = self.start_next_stage(stage, engine);
            has_moved = true;
        }
        has_moved
    }

    /// Advances the data; returns true if any chunk has moved.
    fn advance_data(&mut self, engine: &MpiInner) -> bool {
        match &mut self.stage {
            CollectiveStage::Data { stream, round, .. } => {
                let has_moved = stream.advance(&mut **round);
                engine.or_exit(&self.ctx, has_moved)
            }
            CollectiveStage::Headers { .. }
            | CollectiveStage::Texts { .. }
            | CollectiveStage::Over(_) => false,
        }
    }

    /// Returns true if all messages of the stage have been sent and received, so that the next
    /// stage can start. The last stage is never complete.
    fn is_stage_complete(&mut self, engine: &MpiInner) -> bool {
        let are_complete = match &mut self.stage {
            CollectiveStage::Headers { messages, .. } => messages.are_complete(),
            CollectiveStage::Texts { messages, rests, .. } => match rests.are_complete() {
                Ok(true) => messages.are_complete(),
                incomplete_or_error => incomplete_or_error,
            },
            CollectiveStage::Data { stream, .. } => return stream.is_over(),
            CollectiveStage::Over(_) => return false,
        };
        engine.or_exit(&self.ctx, are_complete)
    }

    /// Consumes the messages of a complete stage, and starts the stage after it.
    fn start_next_stage(&self, stage: CollectiveStage, engine: &MpiInner) -> CollectiveStage {
        match stage {
            CollectiveStage::Headers { messages, own, tensors, round } => {
                let headers = engine.or_exit(&self.ctx, messages.into_received());
                match self.find_mismatch(&own, &headers) {
                    None => self.start_data_stage(engine, round),
                    Some(other) => self.start_texts_stage(engine, &tensors, other, &headers),
                }
            }
            CollectiveStage::Texts { messages, own, other, .. } => {
                let texts = engine.or_exit(&self.ctx, messages.into_received());
                let own_rank = self.ctx.rank;
                let error = disagreement(&self.ctx, other, |rank| {
                    if rank == own_rank { own.clone() } else { texts[&rank].clone() }
                });
                exit_all(&engine.session.world, &error.to_string())
            }
            CollectiveStage::Data { stream, round } => {
                // Free the stream's buffers before the round converts its results.
                drop(stream);
                CollectiveStage::Over(round.finish())
            }
            CollectiveStage::Over(results) => CollectiveStage::Over(results),
        }
    }

    /// Returns the first rank whose header has a different hash from rank 0's.
    fn find_mismatch(
        &self,
        own: &MemberHeader,
        headers: &BTreeMap<usize, Vec<u8>>,
    ) -> Option<usize> {
        let hash = |rank| {
            if rank == self.ctx.rank { own.hash } else { MemberHeader::read(&headers[&rank]).hash }
        };
        (1..self.ctx.size()).find(|&rank| hash(rank) != hash(0))
    }

    /// Starts the round of data.
    fn start_data_stage(&self, engine: &MpiInner, round: Box<dyn MpiRound>) -> CollectiveStage {
        let stream = ChunkStream::start(self.comm(engine), self.tag, self.others(), &*round);
        CollectiveStage::Data { stream: engine.or_exit(&self.ctx, stream), round }
    }

    /// Starts the exchange of descriptions, since rank `other` does not agree with rank 0.
    fn start_texts_stage(
        &self,
        engine: &MpiInner,
        tensors: &[Tensor],
        other: usize,
        headers: &BTreeMap<usize, Vec<u8>>,
    ) -> CollectiveStage {
        let own = description(&self.ctx.call, tensors);
        let rests = OwnedMessages::start(
            self.comm(engine),
            MessageKind::Rest as i32,
            headers.iter().map(|(from, header)| (*from, MemberHeader::read(header).n_rest_bytes())),
            [],
        );
        let messages = OwnedMessages::start(
            self.comm(engine),
            MessageKind::Text as i32,
            self.others().map(|from| (from, TEXT_BYTES)),
            self.others().map(|to| (to, own.clone())),
        );
        let rests = engine.or_exit(&self.ctx, rests);
        CollectiveStage::Texts { messages: engine.or_exit(&self.ctx, messages), rests, own, other }
    }

    fn comm<'a>(&self, engine: &'a MpiInner) -> &'a Communicator {
        &engine.groups[&self.set]
    }

    /// Returns the other ranks of the group.
    fn others(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let own_rank = self.ctx.rank;
        (0..self.ctx.size()).filter(move |&rank| rank != own_rank)
    }

    /// Returns true if data or descriptions are in flight, not only headers.
    fn is_moving(&self) -> bool {
        matches!(self.stage, CollectiveStage::Texts { .. } | CollectiveStage::Data { .. })
    }

    /// Returns the ranks with unfinished messages.
    fn unfinished_ranks(&self) -> Vec<usize> {
        match &self.stage {
            CollectiveStage::Headers { messages, .. } | CollectiveStage::Texts { messages, .. } => {
                messages.unfinished_ranks().collect()
            }
            CollectiveStage::Data { stream, .. } => stream.unfinished_ranks().collect(),
            CollectiveStage::Over(_) => Vec::new(),
        }
    }
}
