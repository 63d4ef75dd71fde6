//! The engine of many processes: each is one slot, and they talk through MPI.
//!
//! Everything goes from process to process with nonblocking messages, nothing through MPI's
//! reductions: their order of summation depends on the number of ranks, the size and the library,
//! and they know no halves.

mod backoff;
mod bytes;
mod in_flight;
mod jobs;
mod lists;
mod messages;
mod point_to_point;
mod session;
mod stream;
mod sums;
mod transfer;
mod wire;

use std::{
    collections::BTreeMap,
    fmt, mem, slice,
    sync::{Arc, Mutex, atomic::AtomicUsize},
    time::Duration,
};

use candle_core::{Device, Result, Tensor};
use ferrompi::Communicator;

pub(crate) use self::session::Session;
use self::{
    bytes::{buffer, with_bytes},
    in_flight::Entries,
    jobs::{Gathering, Job, Reducing},
    session::rank_of,
    transfer::Call,
};
use crate::{
    axes::AxisSet,
    device::to_device::{copied, on_host},
    engine::{
        Backend, Engine, Finished, Gathered, Message, PendingCollective, Purpose, Site, Wanted,
        Work,
        processes::{self, Current, ProcessPlace},
        traffic::Counter,
    },
    error::{self, Error, ProcessError},
    grid::Topology,
    reduce::{self, Reduction},
    sync::lock,
};

/// Each set of axes longer than 1 has a communicator of its own: 63 of the 256 that ferrompi holds,
/// so that four meshes may live at a time.
const MAX_AXES: usize = 6;

/// This process's slot and its access to the others.
#[derive(Clone, Debug)]
pub(crate) struct Mpi(Arc<Inner>);

struct Inner {
    topology: Arc<Topology>,
    slot: usize,
    deadline: Duration,
    /// The communicator of this slot's group along each set of axes longer than 1.
    groups: BTreeMap<AxisSet, Communicator>,
    counters: [Counter; 1],
    /// MPI takes one call at a time.
    current: Current,
    /// What members of this call have found out that they do not agree in: a replica may go on after
    /// the error, but the call must not succeed.
    disagreement: Mutex<Option<String>>,
    /// What arrives with headers. Kept from call to call, as `parts`; in words, so that any items
    /// may lie in it. Of the two locks, this one is taken first; neither is ever contended, since
    /// one collective runs at a time.
    inbox: Mutex<Vec<u64>>,
    /// What others send to be added up here.
    parts: Mutex<Vec<u64>>,
    /// What was started and not waited for. Dropped before the session: its requests are MPI's.
    underway: Mutex<Entries>,
    /// How many of them there are; most calls look at nothing else.
    n_in_flight: AtomicUsize,
    /// Dropped last.
    session: Arc<Session>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mpi")
            .field("slot", &self.slot)
            .field("session", &self.session)
            .finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.session.discard(mem::take(&mut self.groups).into_values());
    }
}

impl Mpi {
    /// The backend of this process's slot, and a communicator for each group it is in. All
    /// processes call this.
    pub(crate) fn new(
        session: Arc<Session>,
        topology: Arc<Topology>,
        deadline: Duration,
    ) -> error::Result<Self> {
        let slots = topology.slots();
        let processes = session.size();
        if processes != slots {
            return Err(mpi(format!("{processes} processes do not fill a mesh of {slots} slots")));
        }
        let long = topology.long_axes();
        if long.count_ones() as usize > MAX_AXES {
            return Err(mpi(format!("a mesh has up to {MAX_AXES} axes longer than 1")));
        }
        let slot = session.rank();
        let groups = session.while_nobody_calls(|| groups(&session, &topology, slot))?;
        Ok(Self(Arc::new(Inner {
            topology,
            slot,
            deadline,
            groups,
            counters: Default::default(),
            current: Current::default(),
            disagreement: Mutex::default(),
            inbox: Mutex::default(),
            parts: Mutex::default(),
            underway: Mutex::default(),
            n_in_flight: AtomicUsize::new(0),
            session,
        })))
    }

    /// Enters a collective; `None` for a group of one.
    fn enter<'a>(&'a self, site: &'a Site) -> Result<Option<Call<'a>>> {
        let engine = &*self.0;
        let guard = engine.current.enter(site)?;
        engine.progress();
        if site.size() == 1 {
            return Ok(None);
        }
        let set = engine.topology.long_axes() & site.call.set;
        Ok(Some(Call { engine, site, comm: &engine.groups[&set], _guard: guard }))
    }

    /// The reductions of those of a list's tensors that this rank wants.
    #[expect(clippy::expect_used, reason = "groups of one are served by `replica::alone`")]
    fn reduce_wanted(
        &self,
        site: &Site,
        list: &[Tensor],
        own: &[usize],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        let host: Vec<Tensor> = list.iter().map(on_host).collect::<Result<_>>()?;
        let call = self.enter(site)?.expect("a group of several members");
        let wanted = call.exchange_requests(&host, own)?;
        let sums = call.reduce_wanted(&host, &wanted, reduction)?;
        own.iter().map(|n| sums[n].to_device(list[*n].device())).collect()
    }
}

/// How a collective of lists is carried out.
enum Lists {
    /// By rounds of messages, for which all members pass these tensors alike.
    Round { job: Box<dyn Job>, tensors: Vec<Tensor> },
    /// By asking first who wants what.
    Wanted { list: Vec<Tensor>, own: Vec<usize>, reduction: Reduction },
}

impl Lists {
    fn of(site: &Site, work: Work) -> Result<Self> {
        let rank = site.rank;
        let (job, tensors): (Box<dyn Job>, Vec<Tensor>) = match work {
            // All have the same layout; their runs differ.
            Work::Gather { own, layout, device } => {
                (Box::new(Gathering::of_layout(&own, rank, &layout, &device)?), Vec::new())
            }
            Work::Reduce { list, wanted: Wanted::ByRank(runs), reduction } => {
                (Box::new(Reducing::of_runs(&list, rank, runs, reduction)?), list)
            }
            Work::Reduce { list, wanted: Wanted::Everything, reduction } => {
                (Box::new(Reducing::for_all(&list, rank, site.size(), reduction)?), list)
            }
            Work::Reduce { list, wanted: Wanted::Own(own), reduction } => {
                return Ok(Self::Wanted { list, own, reduction });
            }
        };
        Ok(Self::Round { job, tensors })
    }
}

/// The communicator of a slot's group along each set of axes longer than 1.
fn groups(
    session: &Session,
    topology: &Topology,
    slot: usize,
) -> error::Result<BTreeMap<AxisSet, Communicator>> {
    let long = topology.long_axes();
    // In the same order everywhere, the numbers of sets.
    let sets = (1..=long).filter(|set| set & !long == 0);
    let group = |set| {
        let place = topology.groups(set).place(slot);
        let comm = session.world.split(Some(rank_of(place.group)), rank_of(place.rank));
        let comm = comm.map_err(|error| mpi(error.to_string()))?;
        Ok((set, comm.ok_or_else(|| mpi("no communicator was made".into()))?))
    };
    sets.map(group).collect()
}

fn mpi(reason: String) -> Error {
    ProcessError::Mpi { reason }.into()
}

impl Backend for Mpi {
    fn begin(&self) -> Vec<Arc<dyn Engine>> {
        *lock(&self.0.disagreement) = None;
        vec![Arc::new(self.clone())]
    }

    fn counters(&self) -> &[Counter] {
        &self.0.counters
    }

    fn check_caller(&self) -> error::Result<(), ProcessError> {
        self.0.session.check_caller()
    }

    fn process_allgather(
        &self,
        purpose: Purpose,
        lists: error::Result<Vec<Vec<Tensor>>>,
    ) -> error::Result<Vec<Vec<Tensor>>> {
        let Inner { topology, slot, .. } = &*self.0;
        let place = ProcessPlace { topology, slot: *slot, device: &Device::Cpu };
        processes::process_allgather(self, &place, purpose, lists)
    }
}

impl Engine for Mpi {
    fn all_reduce(&self, site: &Site, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let Some(call) = self.enter(site)? else { return copied(x) };
        let host = on_host(x)?;
        let mut sums = buffer(host.dtype(), host.elem_count())?;
        with_bytes(&host, |bytes| {
            let received = call.exchange_headers(slice::from_ref(&host), 0, bytes)?;
            if received.headers[site.rank].inline {
                let summands = received.all_inline(bytes, site.rank);
                reduce::bytes(host.dtype(), &summands, reduction, sums.bytes_mut())
            } else {
                call.reduce(host.dtype(), bytes, sums.bytes_mut(), reduction)
            }
        })?;
        sums.tensor(host.dims())?.to_device(x.device())
    }

    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Gathered> {
        let Some(call) = self.enter(site)? else {
            return Ok(Gathered::Parts(vec![copied(x)?]));
        };
        let host = on_host(x)?;
        let (items, shapes) = with_bytes(&host, |bytes| call.gather(&host, bytes))?;
        Ok(Gathered::EndToEnd { items: items.to_device(x.device())?, shapes })
    }

    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let Some(call) = self.enter(site)? else {
            return parts.iter().map(copied).collect();
        };
        // Copies: two locks on one storage, with a thread between them that waits to write, would
        // never be granted.
        let on_host: Vec<Tensor> =
            parts.iter().map(|part| copied(&on_host(part)?)).collect::<Result<_>>()?;
        let arrived = call.swap(&on_host)?;
        arrived.iter().map(|part| part.to_device(parts[site.rank].device())).collect()
    }

    fn receive(&self, site: &Site, message: &Message<'_>) -> Result<Option<Tensor>> {
        let Message { x, is_sent, from } = *message;
        let Some(call) = self.enter(site)? else {
            return from.map(|_| copied(x)).transpose();
        };
        let received = if is_sent {
            let host = on_host(x)?;
            with_bytes(&host, |bytes| call.receive(x, bytes, from))?
        } else {
            call.receive(x, &[], from)?
        };
        received.map(|received| received.to_device(x.device())).transpose()
    }

    fn run(&self, site: &Site, work: Work) -> Result<Vec<Tensor>> {
        match Lists::of(site, work)? {
            Lists::Round { job, tensors } => self.run_job(site, &tensors, job),
            Lists::Wanted { list, own, reduction } => {
                self.reduce_wanted(site, &list, &own, reduction)
            }
        }
    }

    fn start(&self, site: &Site, work: Work) -> Result<Box<dyn PendingCollective>> {
        Ok(match Lists::of(site, work)? {
            Lists::Round { job, tensors } => Box::new(self.start_job(site, &tensors, job)?),
            // What the others want must be known before anything can be sent.
            Lists::Wanted { list, own, reduction } => {
                Box::new(Finished(self.reduce_wanted(site, &list, &own, reduction)?))
            }
        })
    }

    fn barrier(&self, site: &Site) -> Result<()> {
        let Some(call) = self.enter(site)? else { return Ok(()) };
        call.exchange_headers(&[], 0, &[]).map(drop)
    }

    fn counter(&self) -> &Counter {
        &self.0.counters[0]
    }

    fn finish(&self) {
        if let Some(why) = lock(&self.0.disagreement).take() {
            session::end(&self.0.session.world, &why);
        }
        if let Err(error) = processes::leave(self, &self.0.topology, self.0.slot) {
            session::end(&self.0.session.world, &error.to_string());
        }
    }

    /// Does not return: the others wait in MPI, where nothing but an end of the program reaches
    /// them.
    fn fail(&self, error: Error) {
        session::end(&self.0.session.world, &error.to_string());
    }

    /// None: a replica that fails ends the program.
    fn failure(&self) -> Option<Error> {
        None
    }
}
