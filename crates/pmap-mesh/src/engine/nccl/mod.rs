//! The engine of many processes with a GPU each: their tensors go from device to device through
//! NCCL.
//!
//! Everything is sent from process to process, nothing through NCCL's reductions: their order of
//! summation depends on the number of ranks, the size and the network. What arrives is added up on
//! the device. There is one communicator: a group along some axes is some of its ranks, which NCCL
//! lets send to each other without the rest.
//!
//! Every collective begins with a header to the other members: a hash of what must agree, so that
//! nobody waits for what the others do not send. A replica waits for headers; for what is then
//! transferred, its device waits. Collectives that are started have a communicator and a thread of
//! their own, which waits for headers while the replica computes (ADR 17).

mod comm_thread;
mod jobs;
mod link;
mod peers;
mod store;
mod swap;
#[cfg(test)]
mod tests;

use std::{
    slice,
    sync::{Arc, OnceLock, mpsc::RecvTimeoutError},
    time::Duration,
};

use candle_core::{CudaDevice, Device, Result, Tensor, bail};
use core_types::Placement;

pub use self::store::NcclStore;
use self::{
    comm_thread::{CommThread, Started},
    jobs::{Job, Sum, Transfers, concat_flat, flat},
    link::{Link, carries, new_id},
    peers::Peer,
    store::{Bootstrap, Id},
    swap::{Call, ExitHandler, Wire, late, nothing},
};
use crate::{
    axes::ALL,
    device::to_device::copied,
    engine::{
        Backend, Engine, Gathered, Message, PendingCollective, Purpose, Site, Work,
        processes::{self, Current, Guard, ProcessPlace, agreement, description},
        traffic::Counter,
    },
    error::{self, CollectiveError, Error, ProcessError},
    grid::{PROCESS_DEADLINE, Topology},
    reduce::Reduction,
};

/// How long the processes of a mesh wait for each other at its start, where connections are made
/// too: as long as they would wait in a collective.
const JOIN_TIME: Duration = PROCESS_DEADLINE;

/// Nobody, as the rank that a member wants to receive from.
const NOBODY: i64 = -1;

/// This process's slot and its access to the others.
#[derive(Clone, Debug)]
pub(crate) struct Nccl(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    topology: Arc<Topology>,
    slot: usize,
    device: Device,
    counters: [Counter; 1],
    /// Messages of two collectives would be mixed up.
    current: Current,
    /// What replicas call.
    called: Wire,
    /// Dropped before the wire that it uses.
    lane: CommThread,
    /// What they start.
    started: Arc<Wire>,
    ending: ExitHandler,
}

impl Nccl {
    /// The backend of this process's slot. All processes call this.
    pub(crate) fn new(
        place: Placement,
        device: &Device,
        store: &NcclStore,
        topology: Arc<Topology>,
        deadline: Duration,
    ) -> error::Result<Self> {
        let processes = place.world_size().as_usize();
        let slots = topology.slots();
        if processes != slots {
            return Err(nccl(format!("{processes} processes do not fill a mesh of {slots} slots")));
        }
        let cuda = device.as_cuda_device().map_err(|error| nccl(error.to_string()))?;
        let new_ids = || Ok([new_id().map_err(nccl)?, new_id().map_err(nccl)?]);
        let bootstrap = store.bootstrap(place, Peer::on(cuda), JOIN_TIME, new_ids)?;
        let ending = ExitHandler {
            slot: place.rank().as_usize(),
            #[cfg(feature = "mpi")]
            session: bootstrap.session.clone(),
        };
        let [of_called, of_started] = bootstrap.ids;
        let mut called = join(cuda, place, of_called, &ending)?;
        let mut started = join(cuda, place, of_started, &ending)?;
        // All have joined: the ids are taken back before any of them can look for those of another
        // mesh.
        drop::<Bootstrap>(bootstrap);
        for wire in [&called, &started] {
            // Connections are made now, and not within the time of the first collective.
            meet_all(wire, &topology, "the start of the mesh")
                .map_err(|error| nccl(error.to_string()))?;
        }
        called.patience = deadline;
        called.deadline = deadline;
        // A replica that computes does not wait: the time counts from `wait` on.
        started.patience = Duration::MAX;
        started.deadline = deadline;
        Ok(Self(Arc::new(Inner {
            topology,
            slot: ending.slot,
            device: device.clone(),
            counters: Default::default(),
            current: Current::default(),
            called,
            lane: CommThread::new().map_err(|error| nccl(error.to_string()))?,
            started: Arc::new(started),
            ending,
        })))
    }
}

/// A wire of its own communicator, which all processes join.
fn join(cuda: &CudaDevice, place: Placement, id: Id, ending: &ExitHandler) -> error::Result<Wire> {
    let end = ending.clone();
    let link = Link::join(cuda, place, id, JOIN_TIME, move |why| end.end(why)).map_err(nccl)?;
    Ok(Wire {
        link: Box::new(link),
        patience: JOIN_TIME,
        deadline: JOIN_TIME,
        ending: ending.clone(),
        broken: OnceLock::new(),
    })
}

/// Returns when all slots of the mesh have called it.
fn meet_all(wire: &Wire, topology: &Topology, op: &'static str) -> Result<()> {
    let site = Site::along(ALL, topology, wire.ending.slot, op, None);
    let site = site.map_err(candle_core::Error::wrap)?;
    if site.size() == 1 {
        return Ok(());
    }
    let agreement = agreement(&site.call, &[]);
    let text = || description(&site.call, &[]);
    Call { wire, site: &site }.exchange_headers(agreement, 0, text).map(drop)
}

fn nccl(reason: String) -> Error {
    ProcessError::Nccl { reason }.into()
}

impl Backend for Nccl {
    fn begin(&self) -> Vec<Arc<dyn Engine>> {
        vec![Arc::new(self.clone())]
    }

    fn counters(&self) -> &[Counter] {
        &self.0.counters
    }

    fn process_allgather(
        &self,
        purpose: Purpose,
        lists: error::Result<Vec<Vec<Tensor>>>,
    ) -> error::Result<Vec<Vec<Tensor>>> {
        let Inner { topology, slot, device, .. } = &*self.0;
        let place = ProcessPlace { topology, slot: *slot, device };
        processes::process_allgather(self, &place, purpose, lists)
    }
}

impl Inner {
    /// Enters a collective of these tensors; returns it with the `aux` of all members, by rank, or
    /// `None` for a group of one.
    ///
    /// # Errors
    ///
    /// On all members alike, if they do not agree; on this one, if a tensor cannot be sent.
    fn enter<'a>(
        &'a self,
        site: &'a Site,
        tensors: &[Tensor],
        aux: i64,
    ) -> Result<Option<(Call<'a>, Vec<i64>, Guard<'a>)>> {
        let guard = self.current.enter(site)?;
        tensors.iter().try_for_each(|x| self.check_sendable(site, x))?;
        if site.size() == 1 {
            return Ok(None);
        }
        let call = Call { wire: &self.called, site };
        let agreement = agreement(&site.call, tensors);
        let of_all = call.exchange_headers(agreement, aux, || description(&site.call, tensors))?;
        Ok(Some((call, of_all, guard)))
    }

    fn check_sendable(&self, site: &Site, x: &Tensor) -> Result<()> {
        if !x.device().same_device(&self.device) {
            return Err(candle_core::Error::wrap(CollectiveError::OtherDevice {
                call: Arc::clone(&site.call),
                found: x.device().location(),
                expected: self.device.location(),
            }));
        }
        if !carries(x.dtype()) {
            bail!(
                "tensors of type {} cannot be sent over NCCL; convert them, for example to i64 or f32",
                x.dtype().as_str()
            );
        }
        Ok(())
    }

    /// Checks what is handed in for a collective of lists, and packs it; returns it with the number
    /// and the words in which the members must agree.
    fn prepare(
        &self,
        site: &Site,
        work: Work,
        transfers: Transfers,
    ) -> Result<(Job, u64, Vec<u8>)> {
        let list = match &work {
            Work::Gather { own, .. } => {
                own.iter().try_for_each(|x| self.check_sendable(site, x))?;
                // Runs differ from rank to rank; that all have the same layout, its name says.
                &[]
            }
            Work::Reduce { list, .. } => {
                list.iter().try_for_each(|x| self.check_sendable(site, x))?;
                &list[..]
            }
        };
        let agreement = agreement(&site.call, list);
        let text = description(&site.call, list);
        Ok((Job::new(site, work, transfers)?, agreement, text))
    }
}

/// A collective that was started, as its replica has it.
#[derive(Debug)]
struct Handle {
    nccl: Nccl,
    site: Site,
    started: Started,
}

impl PendingCollective for Handle {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        let engine = &*self.nccl.0;
        let _guard = engine.current.enter(&self.site)?;
        let deadline = engine.started.deadline;
        match self.started.recv_timeout(deadline) {
            Ok(job) => job?.finish(),
            Err(RecvTimeoutError::Timeout) => {
                engine.ending.end(&late(&self.site, deadline).to_string())
            }
            Err(RecvTimeoutError::Disconnected) => {
                bail!("the thread that carries out what was started has ended")
            }
        }
    }
}

impl Engine for Nccl {
    fn all_reduce(&self, site: &Site, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let Some((call, _, _guard)) = self.0.enter(site, slice::from_ref(x), 0)? else {
            return copied(x);
        };
        call.carry_out(|| {
            let mut sum = Sum::new(site, flat(x)?, reduction, Transfers::Two)?;
            sum.start(&call)?;
            sum.finish()?.reshape(x.shape())
        })
    }

    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Gathered> {
        let own_size = match site.call.free_dim {
            Some(dim) => number(x.dims()[dim]),
            None => 0,
        };
        let Some((call, sizes, _guard)) = self.0.enter(site, slice::from_ref(x), own_size)? else {
            return Ok(Gathered::Parts(vec![copied(x)?]));
        };
        call.carry_out(|| {
            let shapes: Vec<Vec<usize>> =
                sizes.iter().map(|&size| shape(site, x, size)).collect::<Result<_>>()?;
            let own_items = x.elem_count();
            let n_items = |from: usize| shapes[from].iter().product();
            let parts = call.swap(flat(x)?, |_| 0..own_items, n_items)?;
            let parts = parts.iter().zip(shapes).map(|(part, shape)| part.reshape(shape));
            Ok(Gathered::Parts(parts.collect::<Result<_>>()?))
        })
    }

    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let Some((call, _, _guard)) = self.0.enter(site, &parts, 0)? else {
            return parts.iter().map(copied).collect();
        };
        call.carry_out(|| {
            let shape = parts[site.rank].shape();
            let n_items = shape.elem_count();
            let flat: Vec<Tensor> = parts.iter().map(flat).collect::<Result<_>>()?;
            let source = concat_flat(&flat, parts[0].dtype(), &self.0.device)?;
            let arrived = call.swap(source, |to| to * n_items..(to + 1) * n_items, |_| n_items)?;
            arrived.into_iter().map(|part| part.reshape(shape)).collect()
        })
    }

    fn receive(&self, site: &Site, message: &Message<'_>) -> Result<Option<Tensor>> {
        let Message { x, is_sent, from } = *message;
        let sender = match from {
            Some(rank) => number(rank),
            None => NOBODY,
        };
        let Some((call, senders, _guard)) = self.0.enter(site, slice::from_ref(x), sender)? else {
            return from.map(|_| copied(x)).transpose();
        };
        let n_items = x.elem_count();
        let own_rank = number(site.rank);
        let arrived = call.carry_out(|| {
            let source = if is_sent { flat(x)? } else { nothing(x.dtype(), x.device())? };
            call.swap(
                source,
                |to| if senders[to] == own_rank { 0..n_items } else { 0..0 },
                |sender| if from == Some(sender) { n_items } else { 0 },
            )
        })?;
        match from {
            None => Ok(None),
            // Its own would change with the argument.
            Some(from) if from == site.rank => Ok(Some(copied(x)?)),
            Some(from) => Ok(Some(arrived[from].reshape(x.shape())?)),
        }
    }

    fn run(&self, site: &Site, work: Work) -> Result<Vec<Tensor>> {
        let _guard = self.0.current.enter(site)?;
        let (mut job, agreement, text) = self.0.prepare(site, work, Transfers::Two)?;
        let call = Call { wire: &self.0.called, site };
        call.exchange_headers(agreement, 0, || text)?;
        call.carry_out(|| job.start(&call))?;
        job.finish()
    }

    fn start(&self, site: &Site, work: Work) -> Result<Box<dyn PendingCollective>> {
        let _guard = self.0.current.enter(site)?;
        let (job, agreement, text) = self.0.prepare(site, work, Transfers::One)?;
        let wire = Arc::clone(&self.0.started);
        let of_lane = site.clone();
        let started = self.0.lane.carry_out(job, move |job| {
            let call = Call { wire: &wire, site: &of_lane };
            call.exchange_headers(agreement, 0, || text)?;
            call.carry_out(|| job.start(&call))
        });
        Ok(Box::new(Handle { nccl: self.clone(), site: site.clone(), started }))
    }

    /// Returns when all have called it, and what each has begun on its device is done.
    fn barrier(&self, site: &Site) -> Result<()> {
        self.0.device.synchronize()?;
        self.0.enter(site, &[], 0).map(drop)
    }

    fn counter(&self) -> &Counter {
        &self.0.counters[0]
    }

    fn finish(&self) {
        if let Err(error) = processes::leave(self, &self.0.topology, self.0.slot) {
            self.0.ending.end(&error.to_string());
        }
    }

    /// Does not return: the others wait on their devices, where nothing but an end of the program
    /// reaches them.
    fn fail(&self, error: Error) {
        self.0.ending.end(&error.to_string());
    }

    /// None: a replica that fails ends the program.
    fn failure(&self) -> Option<Error> {
        None
    }
}

/// The shape of what a rank contributes to a gathering, if it has `n_rows` in the free dimension.
fn shape(site: &Site, x: &Tensor, n_rows: i64) -> Result<Vec<usize>> {
    let mut dims = x.dims().to_vec();
    if let Some(dim) = site.call.free_dim {
        dims[dim] = usize::try_from(n_rows)?;
    }
    Ok(dims)
}

/// A size or rank as headers hold it.
#[expect(clippy::expect_used, reason = "sizes of tensors in memory fit 63 bits")]
fn number(n: usize) -> i64 {
    i64::try_from(n).expect("a size fits")
}
