//! Collectives of lists that are under way while this process computes.
//!
//! What they send and receive lies in buffers that their requests own: these live as long as MPI
//! may look at them, whatever becomes of the replica. All of them are carried on whenever this
//! process is in MPI for any reason. No second thread makes calls beside it: MPI would have to lock
//! for it, which costs every message of the first (ADR 17).

use std::{collections::BTreeMap, mem, sync::atomic::Ordering};

use candle_core::{Result, Tensor, bail};

use super::{
    Inner, Mpi,
    jobs::{Job, Next},
    messages::Messages,
    session::end,
    transfer::{Kind, MAX_REQUESTS, Patience},
    wire::{FIRST_BYTES, Header},
};
use crate::{
    engine::{
        self, Site,
        processes::{TEXT_BYTES, agreement, description, disagreement},
    },
    mesh::axes::AxisSet,
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
        messages: Messages<u8>,
        own: Header,
        text: Vec<u8>,
        outgoing: Outgoing,
        job: Job,
    },
    /// They do not agree, and tell each other in words; this one and that of rank `other` differ.
    Texts {
        messages: Messages<u8>,
        /// What else members have sent with their headers that have not started this one but called
        /// another: they tell nothing before somebody has taken it.
        rests: Messages<u8>,
        own: Vec<u8>,
        other: usize,
    },
    /// A round of data.
    Data {
        messages: Messages<u64>,
        job: Job,
        n_th: i32,
    },
    Over(Results),
}

type Results = Result<Vec<Tensor>>;

impl Stage {
    fn failed(error: candle_core::Error) -> Self {
        Self::Over(Err(error))
    }
}

/// What is sent to each rank in the first round: packed at the start, as what was handed in may be
/// changed later.
type Outgoing = Vec<(usize, Vec<u64>)>;

/// The collectives of a process that are under way, in the order in which they were started.
#[derive(Default)]
pub(super) struct Entries {
    list: Vec<Entry>,
    next_ticket: u64,
    /// How many were started in the group along each set of axes.
    n_started: BTreeMap<AxisSet, u64>,
}

/// A collective that was started, as its replica has it.
#[derive(Debug)]
pub(super) struct Handle {
    mpi: Mpi,
    site: Site,
    ticket: u64,
}

impl engine::Underway for Handle {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        let engine = &*self.mpi.0;
        let _guard = engine.current.enter(&self.site)?;
        let mut patience = Patience::new(engine.deadline);
        loop {
            engine.progress();
            let (ranks, is_only_to_hear) = match engine.outcome(self.ticket) {
                Ok(results) => return results,
                Err(waits_for) => waits_for,
            };
            if !patience.pause(is_only_to_hear) {
                engine.end_late(&self.site, ranks);
            }
        }
    }
}

impl Mpi {
    /// Starts a collective: its headers are sent, and its data follow when all members have been
    /// heard of.
    pub(super) fn start_job(&self, site: &Site, tensors: &[Tensor], job: Job) -> Result<Handle> {
        let engine = &*self.0;
        let _guard = engine.current.enter(site)?;
        engine.refuse_too_many(site)?;
        let others = (0..site.size()).filter(|&rank| rank != site.rank);
        let outgoing = job.outgoing(others.clone())?;
        let set = engine.topology.long_axes() & site.call.set;
        let own = Header::of(agreement(&site.call, tensors));
        let messages = Messages::start(
            &engine.groups[&set],
            Kind::Header as i32,
            others.clone().map(|from| (from, FIRST_BYTES)),
            others.map(|to| (to, own.bytes())),
        );
        let messages = engine.checked(site, messages);
        let text = description(&site.call, tensors);
        let stage = Stage::Headers { messages, own, text, outgoing, job };
        let ticket = engine.add_entry(site, set, stage);
        engine.progress();
        Ok(Handle { mpi: self.clone(), site: site.clone(), ticket })
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

    #[expect(clippy::expect_used, reason = "tags are below `2 * N_TAGS`")]
    fn add_entry(&self, site: &Site, set: AxisSet, stage: Stage) -> u64 {
        let mut underway = lock(&self.underway);
        let count = underway.n_started.entry(set).or_default();
        // In the same order on all members, so that a collective has the same tags on all of them.
        let tag = FIRST_TAG + 2 * i32::try_from(*count % N_TAGS).expect("a tag fits");
        *count += 1;
        let ticket = underway.next_ticket;
        underway.next_ticket += 1;
        underway.list.push(Entry { ticket, site: site.clone(), set, tag, stage });
        // Read by this thread alone, or by one that has taken a lock since.
        self.n_underway.store(underway.list.len(), Ordering::Relaxed);
        ticket
    }

    /// Carries on what is under way, as far as it goes without waiting.
    pub(super) fn progress(&self) {
        if self.n_underway.load(Ordering::Relaxed) > 0 {
            lock(&self.underway).list.iter_mut().for_each(|entry| entry.advance(self));
        }
    }

    /// The results of a collective that is over, which is then forgotten; or which members it waits
    /// for, and whether only to hear of them.
    #[expect(clippy::expect_used, reason = "who waits for a collective has not done so before")]
    fn outcome(&self, ticket: u64) -> std::result::Result<Results, (Vec<usize>, bool)> {
        let mut underway = lock(&self.underway);
        let position = underway.list.iter().position(|entry| entry.ticket == ticket);
        let position = position.expect("a collective is listed until it has been waited for");
        let entry = &mut underway.list[position];
        let Stage::Over(results) = &mut entry.stage else { return Err(entry.waits_for()) };
        let results = mem::replace(results, Ok(Vec::new()));
        underway.list.remove(position);
        self.n_underway.store(underway.list.len(), Ordering::Relaxed);
        Ok(results)
    }

    fn checked<T>(&self, site: &Site, result: ferrompi::Result<T>) -> T {
        match result {
            Ok(value) => value,
            Err(error) => end(&self.session.world, &format!("{error} in {}", site.call)),
        }
    }
}

impl Entry {
    /// Goes from stage to stage, as far as what it waits for has arrived.
    fn advance(&mut self, engine: &Inner) {
        while self.has_arrived(engine) {
            let stage = mem::replace(&mut self.stage, Stage::Over(Ok(Vec::new())));
            self.stage = self.next_stage(stage, engine);
        }
    }

    fn has_arrived(&mut self, engine: &Inner) -> bool {
        let arrived = match &mut self.stage {
            Stage::Headers { messages, .. } => messages.have_arrived(),
            Stage::Texts { messages, rests, .. } => rests
                .have_arrived()
                .and_then(|have_rests| Ok(have_rests && messages.have_arrived()?)),
            Stage::Data { messages, .. } => messages.have_arrived(),
            Stage::Over(_) => return false,
        };
        engine.checked(&self.site, arrived)
    }

    fn next_stage(&self, stage: Stage, engine: &Inner) -> Stage {
        match stage {
            Stage::Headers { messages, own, text, outgoing, job } => {
                let arrived = engine.checked(&self.site, messages.arrived());
                match self.disagreeing(&own, &arrived) {
                    None => self.round(engine, job, outgoing, 0),
                    Some(other) => self.texts(engine, text, other, &arrived),
                }
            }
            Stage::Texts { messages, own, other, .. } => {
                let arrived = engine.checked(&self.site, messages.arrived());
                let own_rank = self.site.rank;
                let text =
                    |rank| if rank == own_rank { own.clone() } else { arrived[&rank].clone() };
                end(&engine.session.world, &disagreement(&self.site, other, text).to_string())
            }
            Stage::Data { messages, job, n_th } => {
                let arrived = engine.checked(&self.site, messages.arrived());
                let next = job.finish(self.site.rank, &arrived);
                next.and_then(|next| self.after(engine, next, n_th)).unwrap_or_else(Stage::failed)
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

    /// The stage after round `n_th`.
    fn after(&self, engine: &Inner, next: Next, n_th: i32) -> Result<Stage> {
        match next {
            Next::Results(results) => Ok(Stage::Over(Ok(results))),
            Next::Round(job) => {
                let outgoing = job.outgoing(self.others())?;
                Ok(self.round(engine, job, outgoing, n_th + 1))
            }
        }
    }

    /// The stage of a round of data.
    fn round(&self, engine: &Inner, job: Job, outgoing: Outgoing, n_th: i32) -> Stage {
        let incoming = self.others().map(|from| (from, job.incoming(from, self.site.rank)));
        let comm = &engine.groups[&self.set];
        let messages = Messages::start(comm, self.tag + n_th, incoming, outgoing);
        Stage::Data { messages: engine.checked(&self.site, messages), job, n_th }
    }

    fn texts(
        &self,
        engine: &Inner,
        own: Vec<u8>,
        other: usize,
        headers: &BTreeMap<usize, Vec<u8>>,
    ) -> Stage {
        let rests = Messages::start(
            &engine.groups[&self.set],
            Kind::Rest as i32,
            headers.iter().map(|(from, header)| (*from, Header::read(header).rest_bytes())),
            [],
        );
        let messages = Messages::start(
            &engine.groups[&self.set],
            Kind::Text as i32,
            self.others().map(|from| (from, TEXT_BYTES)),
            self.others().map(|to| (to, own.clone())),
        );
        let rests = engine.checked(&self.site, rests);
        Stage::Texts { messages: engine.checked(&self.site, messages), rests, own, other }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own_rank = self.site.rank;
        (0..self.site.size()).filter(move |&rank| rank != own_rank)
    }

    fn waits_for(&self) -> (Vec<usize>, bool) {
        match &self.stage {
            Stage::Headers { messages, .. } | Stage::Texts { messages, .. } => {
                (messages.missing().collect(), true)
            }
            Stage::Data { messages, .. } => (messages.missing().collect(), false),
            Stage::Over(_) => (Vec::new(), false),
        }
    }
}
