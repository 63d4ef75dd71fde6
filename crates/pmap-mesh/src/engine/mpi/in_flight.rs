//! Collectives of lists that are under way while this process computes.
//!
//! What they send and receive lies in buffers that their requests own: these live as long as MPI
//! may look at them, whatever becomes of the replica. All of them are carried on whenever this
//! process is in MPI for any reason. No second thread makes calls beside it: MPI would have to lock
//! for it, which costs every message of the first (ADR 17).

use std::{collections::BTreeMap, fmt::Display, mem, sync::atomic::Ordering};

use candle_core::{Result, Tensor, bail};
use ferrompi::Communicator;

use super::{
    Inner, Mpi,
    backoff::{TransferProgress, WaitBackoff},
    jobs::{Job, Next},
    messages::Messages,
    session::end,
    stream::Stream,
    transfer::{Call, Kind, MAX_REQUESTS, TRIES},
    wire::{FIRST_BYTES, Header},
};
use crate::{
    axes::AxisSet,
    engine::{
        self, Site,
        processes::{TEXT_BYTES, agreement, description, disagreement},
    },
    sync::lock,
};

/// The tags of data: two for each of so many collectives under way in a group. The first tags are
/// those of [`Kind`], and MPI has 32,767 at least. More cannot be under way, since each has two
/// requests.
const FIRST_TAG: i32 = 16;
const N_TAGS: u64 = 8192;

/// A collective under way, of one group that this process is in.
struct Entry {
    ticket: u64,
    site: Site,
    set: AxisSet,
    /// Of its first round; a second one has the next.
    tag: i32,
    stage: Stage,
}

enum Stage {
    /// The members tell each other what they have started.
    Headers {
        messages: Messages,
        own: Header,
        /// What the members must pass alike.
        tensors: Vec<Tensor>,
        job: Box<dyn Job>,
    },
    /// They do not agree, and tell each other in words; this one and that of rank `other` differ.
    Texts {
        messages: Messages,
        /// What else members have sent with their headers that have not started this one but called
        /// another: they tell nothing before somebody has taken it.
        rests: Messages,
        own: Vec<u8>,
        other: usize,
    },
    /// A round of data.
    Data {
        stream: Stream,
        job: Box<dyn Job>,
        n_th: i32,
    },
    Over(Results),
}

type Results = Result<Vec<Tensor>>;

/// The collectives of a process that are under way, in the order in which they were started.
#[derive(Default)]
pub(super) struct Entries {
    list: Vec<Entry>,
    next_ticket: u64,
    /// How many were started in the group along each set of axes.
    n_started: BTreeMap<AxisSet, u64>,
}

impl Entries {
    #[expect(clippy::expect_used, reason = "who waits for a collective has not done so before")]
    fn position(&self, ticket: u64) -> usize {
        let position = self.list.iter().position(|entry| entry.ticket == ticket);
        position.expect("a collective is listed until it has been waited for")
    }
}

/// A collective that was started, as its replica has it.
#[derive(Debug)]
pub(super) struct Handle {
    mpi: Mpi,
    site: Site,
    ticket: u64,
}

impl engine::PendingCollective for Handle {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        let engine = &*self.mpi.0;
        let _guard = engine.current.enter(&self.site)?;
        engine.wait_for(&self.site, self.ticket)
    }
}

impl Mpi {
    /// Starts a collective: its headers are sent, and its data follow when all members have been
    /// heard of. All must pass these tensors alike.
    pub(super) fn start_job(
        &self,
        site: &Site,
        tensors: &[Tensor],
        job: Box<dyn Job>,
    ) -> Result<Handle> {
        let engine = &*self.0;
        let _guard = engine.current.enter(site)?;
        engine.refuse_too_many(site)?;
        let ticket = engine.begin(site, tensors, job);
        Ok(Handle { mpi: self.clone(), site: site.clone(), ticket })
    }

    /// Carries out a collective, of which the call has its own place beside those under way.
    pub(super) fn run_job(
        &self,
        site: &Site,
        tensors: &[Tensor],
        job: Box<dyn Job>,
    ) -> Result<Vec<Tensor>> {
        let engine = &*self.0;
        let _guard = engine.current.enter(site)?;
        let ticket = engine.begin(site, tensors, job);
        engine.wait_for(site, ticket)
    }
}

impl Call<'_> {
    /// Carries out what follows in this collective, on which its members have agreed.
    pub(super) fn run_agreed(&self, job: Box<dyn Job>) -> Result<Vec<Tensor>> {
        let engine = self.engine;
        let ticket = engine.add_entry(self.site, |entry| entry.round(engine, job, 0));
        engine.wait_for(self.site, ticket)
    }
}

impl Inner {
    /// Refuses a collective whose messages MPI could not carry beside those under way.
    fn refuse_too_many(&self, site: &Site) -> Result<()> {
        let n_requests = |site: &Site| 2 * (site.size() - 1);
        let underway = lock(&self.underway);
        let taken: usize = underway.list.iter().map(|entry| n_requests(&entry.site)).sum();
        if taken + n_requests(site) > MAX_REQUESTS {
            bail!(
                "{} collectives are under way already, with {taken} of at most {MAX_REQUESTS} messages; \
                 wait for some of them",
                underway.list.len()
            );
        }
        Ok(())
    }

    /// Sends the headers of a collective.
    fn begin(&self, site: &Site, tensors: &[Tensor], job: Box<dyn Job>) -> u64 {
        let own = Header::of(agreement(&site.call, tensors));
        let ticket = self.add_entry(site, |entry| {
            let messages = Messages::start(
                entry.comm(self),
                Kind::Header as i32,
                entry.others().map(|from| (from, FIRST_BYTES)),
                entry.others().map(|to| (to, own.bytes())),
            );
            let messages = self.checked(site, messages);
            Stage::Headers { messages, own, tensors: tensors.to_vec(), job }
        });
        self.progress();
        ticket
    }

    #[expect(clippy::expect_used, reason = "tags are below `2 * N_TAGS`")]
    fn add_entry(&self, site: &Site, stage: impl FnOnce(&Entry) -> Stage) -> u64 {
        let mut underway = lock(&self.underway);
        let set = self.topology.long_axes() & site.call.set;
        let count = underway.n_started.entry(set).or_default();
        // In the same order on all members, so that a collective has the same tags on all of them.
        let tag = FIRST_TAG + 2 * i32::try_from(*count % N_TAGS).expect("a tag fits");
        *count += 1;
        let ticket = underway.next_ticket;
        underway.next_ticket += 1;
        let over = Stage::Over(Ok(Vec::new()));
        let mut entry = Entry { ticket, site: site.clone(), set, tag, stage: over };
        entry.stage = stage(&entry);
        underway.list.push(entry);
        // Read by this thread alone, or by one that has taken a lock since.
        self.n_in_flight.store(underway.list.len(), Ordering::Relaxed);
        ticket
    }

    /// Carries on what is under way, as far as it goes without waiting.
    pub(super) fn progress(&self) -> TransferProgress {
        let mut motion = TransferProgress::default();
        if self.n_in_flight.load(Ordering::Relaxed) > 0 {
            for entry in &mut lock(&self.underway).list {
                motion.has_moved |= entry.advance(self);
                motion.is_moving |= entry.is_moving();
            }
        }
        motion
    }

    /// Waits for a collective that was begun.
    fn wait_for(&self, site: &Site, ticket: u64) -> Results {
        let mut patience = WaitBackoff::new(self.deadline);
        loop {
            let mut motion = TransferProgress::default();
            for _ in 0..TRIES {
                motion = motion.then(self.progress());
                if let Some(results) = self.outcome(ticket) {
                    return results;
                }
            }
            self.pause(site, &mut patience, motion, || self.missing(ticket));
        }
    }

    /// The results of a collective, which is then forgotten, if it is over.
    fn outcome(&self, ticket: u64) -> Option<Results> {
        let mut underway = lock(&self.underway);
        let position = underway.position(ticket);
        let Stage::Over(results) = &mut underway.list[position].stage else { return None };
        let results = mem::replace(results, Ok(Vec::new()));
        underway.list.remove(position);
        self.n_in_flight.store(underway.list.len(), Ordering::Relaxed);
        Some(results)
    }

    /// The ranks that a collective waits for.
    fn missing(&self, ticket: u64) -> Vec<usize> {
        let underway = lock(&self.underway);
        underway.list[underway.position(ticket)].missing()
    }

    /// What goes wrong with messages ends the program: those that were started could not be taken
    /// back.
    fn checked<T, E: Display>(&self, site: &Site, result: std::result::Result<T, E>) -> T {
        match result {
            Ok(value) => value,
            Err(error) => end(&self.session.world, &format!("{error} in {}", site.call)),
        }
    }
}

impl Entry {
    /// Goes from stage to stage, as far as what it waits for has arrived; returns whether anything
    /// has.
    fn advance(&mut self, engine: &Inner) -> bool {
        let mut has_moved = self.carry_on(engine);
        while self.has_arrived(engine) {
            let stage = mem::replace(&mut self.stage, Stage::Over(Ok(Vec::new())));
            self.stage = self.next_stage(stage, engine);
            has_moved = true;
        }
        has_moved
    }

    /// Carries data on within a round.
    fn carry_on(&mut self, engine: &Inner) -> bool {
        match &mut self.stage {
            Stage::Data { stream, job, .. } => {
                let has_moved = stream.advance(&mut **job);
                engine.checked(&self.site, has_moved)
            }
            Stage::Headers { .. } | Stage::Texts { .. } | Stage::Over(_) => false,
        }
    }

    fn has_arrived(&mut self, engine: &Inner) -> bool {
        let arrived = match &mut self.stage {
            Stage::Headers { messages, .. } => messages.have_arrived(),
            Stage::Texts { messages, rests, .. } => rests
                .have_arrived()
                .and_then(|have_rests| Ok(have_rests && messages.have_arrived()?)),
            Stage::Data { stream, .. } => return stream.is_over(),
            Stage::Over(_) => return false,
        };
        engine.checked(&self.site, arrived)
    }

    fn next_stage(&self, stage: Stage, engine: &Inner) -> Stage {
        match stage {
            Stage::Headers { messages, own, tensors, job } => {
                let arrived = engine.checked(&self.site, messages.arrived());
                match self.disagreeing(&own, &arrived) {
                    None => self.round(engine, job, 0),
                    Some(other) => self.texts(engine, &tensors, other, &arrived),
                }
            }
            Stage::Texts { messages, own, other, .. } => {
                let arrived = engine.checked(&self.site, messages.arrived());
                let own_rank = self.site.rank;
                let text =
                    |rank| if rank == own_rank { own.clone() } else { arrived[&rank].clone() };
                end(&engine.session.world, &disagreement(&self.site, other, text).to_string())
            }
            Stage::Data { stream, job, n_th } => {
                // Its buffers are not needed beside those of the next round.
                drop(stream);
                match job.finish() {
                    Ok(Next::Round(job)) => self.round(engine, job, n_th + 1),
                    Ok(Next::Results(results)) => Stage::Over(Ok(results)),
                    Err(error) => Stage::Over(Err(error)),
                }
            }
            Stage::Over(results) => Stage::Over(results),
        }
    }

    /// The first rank that has not started what rank 0 has.
    fn disagreeing(&self, own: &Header, arrived: &BTreeMap<usize, Vec<u8>>) -> Option<usize> {
        let hash = |rank| {
            if rank == self.site.rank { own.hash } else { Header::read(&arrived[&rank]).hash }
        };
        (1..self.site.size()).find(|&rank| hash(rank) != hash(0))
    }

    /// The stage of a round of data.
    fn round(&self, engine: &Inner, job: Box<dyn Job>, n_th: i32) -> Stage {
        let stream = Stream::start(self.comm(engine), self.tag + n_th, self.others(), &*job);
        Stage::Data { stream: engine.checked(&self.site, stream), job, n_th }
    }

    fn texts(
        &self,
        engine: &Inner,
        tensors: &[Tensor],
        other: usize,
        headers: &BTreeMap<usize, Vec<u8>>,
    ) -> Stage {
        let own = description(&self.site.call, tensors);
        let rests = Messages::start(
            self.comm(engine),
            Kind::Rest as i32,
            headers.iter().map(|(from, header)| (*from, Header::read(header).rest_bytes())),
            [],
        );
        let messages = Messages::start(
            self.comm(engine),
            Kind::Text as i32,
            self.others().map(|from| (from, TEXT_BYTES)),
            self.others().map(|to| (to, own.clone())),
        );
        let rests = engine.checked(&self.site, rests);
        Stage::Texts { messages: engine.checked(&self.site, messages), rests, own, other }
    }

    fn comm<'a>(&self, engine: &'a Inner) -> &'a Communicator {
        &engine.groups[&self.set]
    }

    /// The other ranks of the group.
    fn others(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let own_rank = self.site.rank;
        (0..self.site.size()).filter(move |&rank| rank != own_rank)
    }

    /// Whether data are on their way, or what is more than a word.
    fn is_moving(&self) -> bool {
        matches!(self.stage, Stage::Texts { .. } | Stage::Data { .. })
    }

    /// The ranks to or from which something is still on its way.
    fn missing(&self) -> Vec<usize> {
        match &self.stage {
            Stage::Headers { messages, .. } | Stage::Texts { messages, .. } => {
                messages.missing().collect()
            }
            Stage::Data { stream, .. } => stream.missing().collect(),
            Stage::Over(_) => Vec::new(),
        }
    }
}
