//! Collectives of lists in flight, which proceed while this process computes.
//!
//! Their requests own the send and receive buffers, so the buffers live as long as MPI may access
//! them, even if the replica ends. Every call into MPI advances all of them. No second thread calls
//! MPI to advance them: MPI would need locks, which slow down every message (ADR 17).

use std::{collections::BTreeMap, fmt::Display, mem, sync::atomic::Ordering};

use candle_core::{Result, Tensor, bail};
use ferrompi::Communicator;

use super::{
    Mpi, MpiInner,
    backoff::{TransferProgress, WaitBackoff},
    header::{FIRST_BYTES, MemberHeader},
    messages::OwnedMessages,
    rounds::{MpiRound, RoundOutcome},
    session::exit_all,
    stream::ChunkStream,
    transfer::{MAX_REQUESTS, MessageKind, MpiCall, POLLS},
};
use crate::{
    axes::AxisSet,
    engine::{
        self, GroupContext,
        processes::{TEXT_BYTES, call_hash, description, disagreement},
    },
    sync::lock,
};

/// The first tag of data. Each of [`N_TAGS`] collectives in flight in a group has two tags.
/// [`MessageKind`] has the tags below, and MPI guarantees 32,767 tags. The number is large enough,
/// because each collective needs at least two of [`MAX_REQUESTS`] requests.
const FIRST_TAG: i32 = 16;
const N_TAGS: u64 = 8192;

/// A collective in flight, in one of this process's groups.
struct InFlightCollective {
    ticket: u64,
    ctx: GroupContext,
    set: AxisSet,
    /// The tag of its first round; a second round uses the next tag.
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
    /// Exchange of descriptions, since the headers of this rank and of rank `other` do not agree.
    Texts {
        messages: OwnedMessages,
        /// The rest of the messages of members that called a different collective: such a member
        /// sends its description only after its message has been received.
        rests: OwnedMessages,
        own: Vec<u8>,
        other: usize,
    },
    /// A round of data.
    Data {
        stream: ChunkStream,
        round: Box<dyn MpiRound>,
        index: i32,
    },
    Over(Results),
}

type Results = Result<Vec<Tensor>>;

/// The collectives of a process in flight, in the order in which they were started.
#[derive(Default)]
pub(super) struct InFlightList {
    list: Vec<InFlightCollective>,
    next_ticket: u64,
    /// The number of collectives started in the group along each set of axes.
    n_started: BTreeMap<AxisSet, u64>,
}

impl InFlightList {
    #[expect(clippy::expect_used, reason = "who waits for a collective has not done so before")]
    fn position(&self, ticket: u64) -> usize {
        let position = self.list.iter().position(|entry| entry.ticket == ticket);
        position.expect("a collective is listed until it has been waited for")
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
    pub(super) fn start_round(
        &self,
        ctx: &GroupContext,
        tensors: &[Tensor],
        round: Box<dyn MpiRound>,
    ) -> Result<MpiHandle> {
        let engine = &*self.0;
        let _guard = engine.current.enter(ctx)?;
        engine.check_request_budget(ctx)?;
        let ticket = engine.begin(ctx, tensors, round);
        Ok(MpiHandle { mpi: self.clone(), ctx: ctx.clone(), ticket })
    }

    /// Runs a collective to its end. The call has a reserved request budget besides the collectives
    /// in flight.
    pub(super) fn run_round(
        &self,
        ctx: &GroupContext,
        tensors: &[Tensor],
        round: Box<dyn MpiRound>,
    ) -> Result<Vec<Tensor>> {
        let engine = &*self.0;
        let _guard = engine.current.enter(ctx)?;
        let ticket = engine.begin(ctx, tensors, round);
        engine.wait_for(ctx, ticket)
    }
}

impl MpiCall<'_> {
    /// Runs the data rounds of this collective, after its members have agreed.
    pub(super) fn run_agreed(&self, round: Box<dyn MpiRound>) -> Result<Vec<Tensor>> {
        let engine = self.engine;
        let ticket = engine.add_entry(self.ctx, |entry| entry.round(engine, round, 0));
        engine.wait_for(self.ctx, ticket)
    }
}

impl MpiInner {
    /// Rejects a collective if its messages would exceed the request budget.
    fn check_request_budget(&self, ctx: &GroupContext) -> Result<()> {
        let n_requests = |ctx: &GroupContext| 2 * (ctx.size() - 1);
        let in_flight = lock(&self.in_flight);
        let taken: usize = in_flight.list.iter().map(|entry| n_requests(&entry.ctx)).sum();
        if taken + n_requests(ctx) > MAX_REQUESTS {
            bail!(
                "{} collectives are in flight already, with {taken} of at most {MAX_REQUESTS} messages; \
                 wait for some of them",
                in_flight.list.len()
            );
        }
        Ok(())
    }

    /// Sends the headers of a collective.
    fn begin(&self, ctx: &GroupContext, tensors: &[Tensor], round: Box<dyn MpiRound>) -> u64 {
        let own = MemberHeader::without_data(call_hash(&ctx.call, tensors));
        let ticket = self.add_entry(ctx, |entry| {
            let messages = OwnedMessages::start(
                entry.comm(self),
                MessageKind::Header as i32,
                entry.others().map(|from| (from, FIRST_BYTES)),
                entry.others().map(|to| (to, own.bytes())),
            );
            let messages = self.checked(ctx, messages);
            CollectiveStage::Headers { messages, own, tensors: tensors.to_vec(), round }
        });
        self.progress();
        ticket
    }

    #[expect(clippy::expect_used, reason = "tags are below `2 * N_TAGS`")]
    fn add_entry(
        &self,
        ctx: &GroupContext,
        stage: impl FnOnce(&InFlightCollective) -> CollectiveStage,
    ) -> u64 {
        let mut in_flight = lock(&self.in_flight);
        let set = self.topology.axes_longer_than_one() & ctx.call.set;
        let count = in_flight.n_started.entry(set).or_default();
        // Members start collectives in the same order, so a collective has the same tags on all of
        // them.
        let tag = FIRST_TAG + 2 * i32::try_from(*count % N_TAGS).expect("a tag fits");
        *count += 1;
        let ticket = in_flight.next_ticket;
        in_flight.next_ticket += 1;
        let finished = CollectiveStage::Over(Ok(Vec::new()));
        let mut entry = InFlightCollective { ticket, ctx: ctx.clone(), set, tag, stage: finished };
        entry.stage = stage(&entry);
        in_flight.list.push(entry);
        // Only this thread reads it, or one that has taken a lock since.
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

    /// Waits for a started collective.
    fn wait_for(&self, ctx: &GroupContext, ticket: u64) -> Results {
        let mut backoff = WaitBackoff::new(self.deadline);
        loop {
            let mut progress = TransferProgress::default();
            for _ in 0..POLLS {
                progress = progress.then(self.progress());
                if let Some(results) = self.outcome(ticket) {
                    return results;
                }
            }
            self.pause(ctx, &mut backoff, progress, || self.missing(ticket));
        }
    }

    /// Takes the results of a collective and removes it, if it is over.
    fn outcome(&self, ticket: u64) -> Option<Results> {
        let mut in_flight = lock(&self.in_flight);
        let position = in_flight.position(ticket);
        let CollectiveStage::Over(results) = &mut in_flight.list[position].stage else {
            return None;
        };
        let results = mem::replace(results, Ok(Vec::new()));
        in_flight.list.remove(position);
        self.n_in_flight.store(in_flight.list.len(), Ordering::Relaxed);
        Some(results)
    }

    /// Returns the ranks that a collective waits for.
    fn missing(&self, ticket: u64) -> Vec<usize> {
        let in_flight = lock(&self.in_flight);
        in_flight.list[in_flight.position(ticket)].missing()
    }

    /// Ends the program on an error of MPI, because started messages cannot be cancelled.
    fn checked<T, E: Display>(&self, ctx: &GroupContext, result: std::result::Result<T, E>) -> T {
        match result {
            Ok(value) => value,
            Err(error) => exit_all(&self.session.world, &format!("{error} in {}", ctx.call)),
        }
    }
}

impl InFlightCollective {
    /// Advances from stage to stage while messages have arrived; returns true on any progress.
    fn advance(&mut self, engine: &MpiInner) -> bool {
        let mut has_moved = self.advance_data(engine);
        while self.has_arrived(engine) {
            let stage = mem::replace(&mut self.stage, CollectiveStage::Over(Ok(Vec::new())));
            self.stage = self.next_stage(stage, engine);
            has_moved = true;
        }
        has_moved
    }

    /// Advances the data of a round.
    fn advance_data(&mut self, engine: &MpiInner) -> bool {
        match &mut self.stage {
            CollectiveStage::Data { stream, round, .. } => {
                let has_moved = stream.advance(&mut **round);
                engine.checked(&self.ctx, has_moved)
            }
            CollectiveStage::Headers { .. }
            | CollectiveStage::Texts { .. }
            | CollectiveStage::Over(_) => false,
        }
    }

    fn has_arrived(&mut self, engine: &MpiInner) -> bool {
        let arrived = match &mut self.stage {
            CollectiveStage::Headers { messages, .. } => messages.have_arrived(),
            CollectiveStage::Texts { messages, rests, .. } => rests
                .have_arrived()
                .and_then(|have_rests| Ok(have_rests && messages.have_arrived()?)),
            CollectiveStage::Data { stream, .. } => return stream.is_over(),
            CollectiveStage::Over(_) => return false,
        };
        engine.checked(&self.ctx, arrived)
    }

    fn next_stage(&self, stage: CollectiveStage, engine: &MpiInner) -> CollectiveStage {
        match stage {
            CollectiveStage::Headers { messages, own, tensors, round } => {
                let arrived = engine.checked(&self.ctx, messages.arrived());
                match self.find_mismatch(&own, &arrived) {
                    None => self.round(engine, round, 0),
                    Some(other) => self.texts(engine, &tensors, other, &arrived),
                }
            }
            CollectiveStage::Texts { messages, own, other, .. } => {
                let arrived = engine.checked(&self.ctx, messages.arrived());
                let own_rank = self.ctx.rank;
                let error = disagreement(&self.ctx, other, |rank| {
                    if rank == own_rank { own.clone() } else { arrived[&rank].clone() }
                });
                exit_all(&engine.session.world, &error.to_string())
            }
            CollectiveStage::Data { stream, round, index } => {
                // Free its buffers before allocating the buffers of the next round.
                drop(stream);
                match round.finish() {
                    Ok(RoundOutcome::Round(round)) => self.round(engine, round, index + 1),
                    Ok(RoundOutcome::Results(results)) => CollectiveStage::Over(Ok(results)),
                    Err(error) => CollectiveStage::Over(Err(error)),
                }
            }
            CollectiveStage::Over(results) => CollectiveStage::Over(results),
        }
    }

    /// Returns the first rank with another header hash than rank 0.
    fn find_mismatch(
        &self,
        own: &MemberHeader,
        arrived: &BTreeMap<usize, Vec<u8>>,
    ) -> Option<usize> {
        let hash = |rank| {
            if rank == self.ctx.rank { own.hash } else { MemberHeader::read(&arrived[&rank]).hash }
        };
        (1..self.ctx.size()).find(|&rank| hash(rank) != hash(0))
    }

    /// Starts a round of data.
    fn round(&self, engine: &MpiInner, round: Box<dyn MpiRound>, index: i32) -> CollectiveStage {
        let stream =
            ChunkStream::start(self.comm(engine), self.tag + index, self.others(), &*round);
        CollectiveStage::Data { stream: engine.checked(&self.ctx, stream), round, index }
    }

    fn texts(
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
            headers.iter().map(|(from, header)| (*from, MemberHeader::read(header).rest_bytes())),
            [],
        );
        let messages = OwnedMessages::start(
            self.comm(engine),
            MessageKind::Text as i32,
            self.others().map(|from| (from, TEXT_BYTES)),
            self.others().map(|to| (to, own.clone())),
        );
        let rests = engine.checked(&self.ctx, rests);
        CollectiveStage::Texts { messages: engine.checked(&self.ctx, messages), rests, own, other }
    }

    fn comm<'a>(&self, engine: &'a MpiInner) -> &'a Communicator {
        &engine.groups[&self.set]
    }

    /// Returns the other ranks of the group.
    fn others(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let own_rank = self.ctx.rank;
        (0..self.ctx.size()).filter(move |&rank| rank != own_rank)
    }

    /// Returns true if more than a header is in flight.
    fn is_moving(&self) -> bool {
        matches!(self.stage, CollectiveStage::Texts { .. } | CollectiveStage::Data { .. })
    }

    /// Returns the ranks with unfinished messages.
    fn missing(&self) -> Vec<usize> {
        match &self.stage {
            CollectiveStage::Headers { messages, .. } | CollectiveStage::Texts { messages, .. } => {
                messages.missing().collect()
            }
            CollectiveStage::Data { stream, .. } => stream.missing().collect(),
            CollectiveStage::Over(_) => Vec::new(),
        }
    }
}
