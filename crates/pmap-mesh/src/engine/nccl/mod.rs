//! The engine of many processes with a GPU each: their tensors go from device to device through
//! NCCL.
//!
//! Everything is sent from process to process, nothing through NCCL's reductions: their order of
//! summation depends on the number of ranks, the size and the network. What arrives is added up on
//! the device. There is one communicator: a group along some axes is some of its ranks, which NCCL
//! lets send to each other without the rest.
//!
//! Every collective begins with a header to the other members: a hash of what must agree, so that
//! nobody waits for what the others do not send. It ends when its result is there, and another
//! thread waits for that, so that a deadline can pass.

mod link;
mod lists;
mod store;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, ops::Range, process, slice, sync::Arc, time::Duration};

use candle_core::{Device, Result, Tensor, Var, bail};
use core_types::Placement;

pub use self::store::NcclStore;
use self::{
    link::{Broken, Carrier, Link, Transfer, carries, new_id},
    store::Bootstrap,
};
use crate::{
    engine::{
        Backend, Engine, Finished, Gathered, Message, Site, Underway, Wanted, Work,
        layout::RunLayout,
        processes::{self, Current, Guard, TEXT_BYTES, agreement, description, disagreement},
        traffic::Counter,
    },
    error::{self, CollectiveError, Error, MeshError, ProcessError},
    mesh::{
        DeviceMesh, DeviceMeshBuilder,
        axes::ALL,
        place::{copied, in_one_piece},
        topology::Topology,
    },
    reduce::{Reduction, elementwise, parts::balanced},
};

/// Up to how many bytes every member reduces everything by itself: a second transfer would take
/// longer.
const SMALL_BYTES: usize = 64 << 10;
/// How long the processes of a mesh wait for each other at its start, where connections are made
/// too: as long as they would wait in a collective.
const JOIN_TIME: Duration = DeviceMesh::PROCESS_DEADLINE;

/// Nobody, as the rank that a member wants to receive from.
const NOBODY: i64 = -1;

impl DeviceMeshBuilder {
    /// Makes the mesh of as many processes as the world of `place` has, one slot each, by rank;
    /// this one's runs on CUDA device `device` of its machine, and tensors go from device to device
    /// through NCCL.
    ///
    /// The launcher knows which process this is and which device it takes: a program passes on the
    /// placement and the local rank of `core_types::Launched`. The processes find each other at
    /// `store`, and wait there for each other for up to ten minutes.
    ///
    /// As over MPI, every process makes the same mesh and calls the same functions with the same
    /// arguments, sums are formed in rank order, and a replica that fails ends its process with its
    /// error on the standard error; the launcher then ends the others, which wait for it. Tensors
    /// of other devices are refused in collectives.
    ///
    /// A mesh without axes is a row named [`DeviceMesh::AXIS`].
    ///
    /// # Errors
    ///
    /// Those of [`devices`](Self::devices), [`MeshError::Device`] if there is no such device,
    /// [`ProcessError::Store`] if the processes cannot find each other, and [`ProcessError::Nccl`]
    /// if NCCL cannot be started or the mesh has not as many slots as there are processes.
    pub fn nccl(
        self,
        place: Placement,
        device: usize,
        store: &NcclStore,
    ) -> error::Result<DeviceMesh> {
        let opened = Device::new_cuda_with_stream(device)
            .map_err(|cause| MeshError::Device { index: device, cause })?;
        let slot = place.rank().as_usize();
        let processes = place.world_size().as_usize();
        processes::mesh(self, slot, processes, opened, |topology, deadline, device| {
            Ok(Arc::new(Nccl::new(place, device, store, Arc::clone(topology), deadline)?))
        })
    }
}

/// This process's slot and its access to the others.
#[derive(Clone, Debug)]
pub(crate) struct Nccl(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    topology: Arc<Topology>,
    slot: usize,
    deadline: Duration,
    device: Device,
    counters: [Counter; 1],
    /// The stream takes one call at a time.
    current: Current,
    link: Box<dyn Carrier>,
    /// The MPI program, if the processes are one; a failure ends it.
    #[cfg(feature = "mpi")]
    session: Option<Arc<crate::engine::mpi::Session>>,
}

/// A collective while this slot takes part in it.
struct Call<'a> {
    engine: &'a Inner,
    site: &'a Site,
    _guard: Guard<'a>,
}

impl Nccl {
    /// The backend of this process's slot. All processes call this.
    fn new(
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
        let bootstrap = store.bootstrap(place, JOIN_TIME, || new_id().map_err(nccl))?;
        let link = Link::join(cuda.clone(), place, bootstrap.id, JOIN_TIME).map_err(nccl)?;
        let mut inner = Inner {
            topology,
            slot: place.rank().as_usize(),
            deadline: JOIN_TIME,
            device: device.clone(),
            counters: Default::default(),
            current: Current::default(),
            link: Box::new(link),
            #[cfg(feature = "mpi")]
            session: bootstrap.session.clone(),
        };
        // All have joined: the id is taken back before any of them can look for that of another
        // mesh.
        drop::<Bootstrap>(bootstrap);
        inner.meet_all("the start of the mesh").map_err(|error| nccl(error.to_string()))?;
        inner.deadline = deadline;
        Ok(Self(Arc::new(inner)))
    }
}

impl Nccl {
    /// Enters a collective of lists, which no group of one comes to.
    #[expect(clippy::expect_used, reason = "groups of one are served by `replica::alone`")]
    fn enter_lists<'a>(&'a self, site: &'a Site, list: &[Tensor]) -> Result<Call<'a>> {
        Ok(self.0.enter(site, list, 0)?.expect("a group of several members").0)
    }

    fn gather_runs(
        &self,
        site: &Site,
        own: &[Tensor],
        layout: &RunLayout,
        device: &Device,
    ) -> Result<Vec<Var>> {
        own.iter().try_for_each(|x| self.0.check_sendable(site, x))?;
        // Runs differ from rank to rank; that all have the same layout, its name says.
        self.enter_lists(site, &[])?.gather_runs(own, layout, device)
    }

    /// Reduces everything for everybody: each process has one device, and it is rare that some of
    /// them want less.
    fn reduce_wanted(
        &self,
        site: &Site,
        list: &[Tensor],
        wanted: &[usize],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        let call = self.enter_lists(site, list)?;
        let mut sums = BTreeMap::new();
        for bucket in lists::buckets(list) {
            let sum = call.reduce(&lists::joined(list, &bucket)?, reduction)?;
            sums.extend(lists::cut(list, &bucket, &sum)?);
        }
        let sum = |n: &usize| match sums.get(n) {
            Some(sum) => Ok(sum.clone()),
            None => bail!("there is no tensor {n} to sum"),
        };
        wanted.iter().map(sum).collect()
    }
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

    fn process_allgather(&self, lists: Vec<Vec<Tensor>>) -> error::Result<Vec<Vec<Tensor>>> {
        let Inner { topology, slot, device, .. } = &*self.0;
        processes::process_allgather(self, topology, *slot, device, &lists[0])
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
    ) -> Result<Option<(Call<'a>, Vec<i64>)>> {
        let guard = self.current.enter(site)?;
        tensors.iter().try_for_each(|x| self.check_sendable(site, x))?;
        if site.size() == 1 {
            return Ok(None);
        }
        let call = Call { engine: self, site, _guard: guard };
        let of_all = call.exchange_headers(tensors, aux)?;
        Ok(Some((call, of_all)))
    }

    /// Returns when all slots of the mesh have called it.
    fn meet_all(&self, op: &'static str) -> Result<()> {
        let site = Site::along(ALL, &self.topology, self.slot, op, None);
        self.enter(&site.map_err(candle_core::Error::wrap)?, &[], 0).map(drop)
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
            bail!("tensors of type {} cannot be sent over NCCL", x.dtype().as_str());
        }
        Ok(())
    }

    /// Says why, and ends this process; the launcher ends the others.
    fn end(&self, why: &str) -> ! {
        #[cfg(feature = "mpi")]
        if let Some(session) = &self.session {
            session.end(why);
        }
        processes::end(self.slot, why, || process::exit(1))
    }
}

impl Call<'_> {
    /// Sends items `part(n)` of `source`, which has one dimension, to each rank n; returns what they
    /// have for this one, `n_items(n)` items of rank n, and what it has for itself, by rank.
    ///
    /// Whatever goes wrong ends the program: what was started could not be taken back.
    fn swap(
        &self,
        source: &Tensor,
        part: impl Fn(usize) -> Range<usize>,
        n_items: impl Fn(usize) -> usize,
    ) -> Result<Vec<Tensor>> {
        let own_rank = self.site.rank;
        let own = part(own_rank);
        let mut all = vec![source.narrow(0, 0, 0)?; self.site.size()];
        let mut transfer =
            Transfer { source: source.clone(), outgoing: Vec::new(), incoming: Vec::new() };
        let mut senders = Vec::new();
        for (rank, &slot) in self.site.members().iter().enumerate() {
            if rank == own_rank {
                continue;
            }
            if !part(rank).is_empty() {
                transfer.outgoing.push((slot, part(rank)));
            }
            if n_items(rank) > 0 {
                transfer.incoming.push((slot, n_items(rank)));
                senders.push(rank);
            }
        }
        for (rank, arrived) in senders.into_iter().zip(self.carry_out(transfer)) {
            all[rank] = arrived;
        }
        all[own_rank] = source.narrow(0, own.start, own.len())?;
        Ok(all)
    }

    fn carry_out(&self, transfer: Transfer) -> Vec<Tensor> {
        if transfer.outgoing.is_empty() && transfer.incoming.is_empty() {
            return Vec::new();
        }
        let engine = self.engine;
        let call = Arc::clone(&self.site.call);
        match engine.link.transfer(transfer, engine.deadline) {
            Ok(arrived) => arrived,
            Err(Broken::Failed(reason)) => engine.end(&format!("{reason} in {call}")),
            Err(Broken::Late) => {
                let slot = self.site.slot();
                let after = engine.deadline;
                let missing = Vec::new();
                let late = CollectiveError::Deadline { slot, missing, call, after };
                engine.end(&late.to_string())
            }
        }
    }

    /// Tells all members what this one calls, and `aux`; returns theirs, by rank.
    fn exchange_headers(&self, tensors: &[Tensor], aux: i64) -> Result<Vec<i64>> {
        let header = [agreement(&self.site.call, tensors).cast_signed(), aux];
        let header = Tensor::new(&header, &self.engine.device)?;
        let headers = self.swap(&header, |_| 0..2, |_| 2)?;
        let headers: Vec<i64> = Tensor::cat(&headers, 0)?.to_vec1()?;
        let headers: Vec<&[i64]> = headers.chunks_exact(2).collect();
        match headers.iter().position(|header| header[0] != headers[0][0]) {
            None => Ok(headers.iter().map(|header| header[1]).collect()),
            Some(other) => Err(self.mismatch(other, tensors)?),
        }
    }

    /// What all members return if the first one and that of rank `other` do not agree.
    fn mismatch(&self, other: usize, tensors: &[Tensor]) -> Result<candle_core::Error> {
        let own = Tensor::new(description(&self.site.call, tensors), &self.engine.device)?;
        let texts = self.swap(&own, |_| 0..TEXT_BYTES, |_| TEXT_BYTES)?;
        let texts: Vec<Vec<u8>> = texts.iter().map(Tensor::to_vec1).collect::<Result<_>>()?;
        Ok(disagreement(self.site, other, |rank| texts[rank].clone()))
    }

    /// The reduction of all members' `x`, which has one dimension; of a large one each member makes
    /// a part.
    fn reduce(&self, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let items = x.elem_count();
        if items * x.dtype().size_in_bytes() <= SMALL_BYTES {
            return elementwise::reduced(&self.swap(x, |_| 0..items, |_| items)?, reduction);
        }
        let part = |rank| balanced(items, rank, self.site.size());
        let own_items = part(self.site.rank).len();
        let summands = self.swap(x, part, |_| own_items)?;
        let sum = elementwise::reduced(&summands, reduction)?;
        // Freed before as much memory is asked for again.
        drop(summands);
        Tensor::cat(&self.swap(&sum, |_| 0..own_items, |from| part(from).len())?, 0)
    }

    /// The shape of what a rank contributes to a gathering, if `size` is its size in the free
    /// dimension.
    fn shape(&self, own: &Tensor, size: i64) -> Result<Vec<usize>> {
        let mut dims = own.dims().to_vec();
        if let Some(dim) = self.site.call.free_dim {
            dims[dim] = usize::try_from(size)?;
        }
        Ok(dims)
    }
}

impl Engine for Nccl {
    fn all_reduce(&self, site: &Site, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let Some((call, _)) = self.0.enter(site, slice::from_ref(x), 0)? else {
            return copied(x);
        };
        call.reduce(&flat(x)?, reduction)?.reshape(x.shape())
    }

    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Gathered> {
        let own_size = match site.call.free_dim {
            Some(dim) => number(x.dims()[dim]),
            None => 0,
        };
        let Some((call, sizes)) = self.0.enter(site, slice::from_ref(x), own_size)? else {
            return Ok(Gathered::Parts(vec![copied(x)?]));
        };
        let shapes: Vec<Vec<usize>> =
            sizes.iter().map(|&size| call.shape(x, size)).collect::<Result<_>>()?;
        let own = flat(x)?;
        let n_items = |from: usize| shapes[from].iter().product();
        let parts = call.swap(&own, |_| 0..own.elem_count(), n_items)?;
        let parts = parts.iter().zip(shapes).map(|(part, shape)| part.reshape(shape));
        Ok(Gathered::Parts(parts.collect::<Result<_>>()?))
    }

    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let Some((call, _)) = self.0.enter(site, &parts, 0)? else {
            return parts.iter().map(copied).collect();
        };
        let shape = parts[site.rank].shape();
        let n_items = shape.elem_count();
        let parts: Vec<Tensor> = parts.iter().map(flat).collect::<Result<_>>()?;
        let source = Tensor::cat(&parts, 0)?;
        let arrived = call.swap(&source, |to| to * n_items..(to + 1) * n_items, |_| n_items)?;
        arrived.into_iter().map(|part| part.reshape(shape)).collect()
    }

    fn receive(&self, site: &Site, message: &Message<'_>) -> Result<Option<Tensor>> {
        let Message { x, is_sent, from } = *message;
        let sender = match from {
            Some(rank) => number(rank),
            None => NOBODY,
        };
        let Some((call, senders)) = self.0.enter(site, slice::from_ref(x), sender)? else {
            return from.map(|_| copied(x)).transpose();
        };
        let n_items = x.elem_count();
        let source = if is_sent { flat(x)? } else { Tensor::zeros(0, x.dtype(), x.device())? };
        let own_rank = number(site.rank);
        let arrived = call.swap(
            &source,
            |to| if senders[to] == own_rank { 0..n_items } else { 0..0 },
            |sender| if from == Some(sender) { n_items } else { 0 },
        )?;
        match from {
            None => Ok(None),
            // Its own would change with the argument.
            Some(from) if from == site.rank => Ok(Some(copied(x)?)),
            Some(from) => Ok(Some(arrived[from].reshape(x.shape())?)),
        }
    }

    fn run(&self, site: &Site, work: Work) -> Result<Vec<Tensor>> {
        match work {
            Work::Gather { own, layout, device } => {
                let leaves = self.gather_runs(site, &own, &layout, &device)?;
                Ok(leaves.into_iter().map(Var::into_inner).collect())
            }
            Work::Reduce { list, wanted: Wanted::Everything, reduction } => {
                let all: Vec<usize> = (0..list.len()).collect();
                self.reduce_wanted(site, &list, &all, reduction)
            }
            Work::Reduce { list, wanted: Wanted::Own(wanted), reduction } => {
                self.reduce_wanted(site, &list, &wanted, reduction)
            }
            Work::Reduce { list, wanted: Wanted::ByRank(runs), reduction } => {
                self.enter_lists(site, &list)?.reduce_runs(&list, &runs, reduction)
            }
        }
    }

    /// Over before it returns: what is under way would wait for the one stream all the same.
    fn start(&self, site: &Site, work: Work) -> Result<Box<dyn Underway>> {
        Ok(Box::new(Finished(self.run(site, work)?)))
    }

    fn barrier(&self, site: &Site) -> Result<()> {
        self.0.enter(site, &[], 0).map(drop)
    }

    fn counter(&self) -> &Counter {
        &self.0.counters[0]
    }

    fn finish(&self) {
        if let Err(error) = processes::leave(self, &self.0.topology, self.0.slot) {
            self.0.end(&error.to_string());
        }
    }

    /// Does not return: the others wait on their devices, where nothing but an end of the program
    /// reaches them.
    fn fail(&self, error: Error) {
        self.0.end(&error.to_string());
    }

    /// None: a replica that fails ends the program.
    fn failure(&self) -> Option<Error> {
        None
    }
}

/// The items of a tensor in one dimension and in one piece.
fn flat(x: &Tensor) -> Result<Tensor> {
    in_one_piece(x)?.flatten_all()
}

/// A size or rank as headers hold it.
#[expect(clippy::expect_used, reason = "sizes of tensors in memory fit 63 bits")]
fn number(n: usize) -> i64 {
    i64::try_from(n).expect("a size fits")
}
