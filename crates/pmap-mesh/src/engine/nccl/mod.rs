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

use std::{collections::BTreeMap, process, slice, sync::Arc, time::Duration};

use candle_core::{Device, Result, Tensor, bail};
use core_types::Placement;

pub use self::store::NcclStore;
use self::{
    link::{Broken, Carrier, Link, Transfer, carries, new_id},
    store::Bootstrap,
};
use crate::{
    engine::{
        Backend, Engine, Site,
        processes::{self, Current, Guard, TEXT_BYTES, agreement, description, disagreement},
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

fn nccl(reason: String) -> Error {
    ProcessError::Nccl { reason }.into()
}

impl Backend for Nccl {
    fn begin(&self) -> Vec<Arc<dyn Engine>> {
        vec![Arc::new(self.clone())]
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
    /// Sends `x(n)`, which has one dimension, to each rank n; returns what they have for this one,
    /// `items(n)` items of rank n, and what it has for itself, by rank.
    ///
    /// Whatever goes wrong ends the program: what was started could not be taken back.
    fn swap(
        &self,
        x: impl Fn(usize) -> Result<Tensor>,
        items: impl Fn(usize) -> usize,
    ) -> Result<Vec<Tensor>> {
        let own_rank = self.site.rank;
        let own = x(own_rank)?;
        let mut all = vec![own.narrow(0, 0, 0)?; self.site.size()];
        let mut transfer =
            Transfer { dtype: own.dtype(), outgoing: Vec::new(), incoming: Vec::new() };
        let mut senders = Vec::new();
        for (rank, &slot) in self.site.members().iter().enumerate() {
            if rank == own_rank {
                continue;
            }
            let x = x(rank)?;
            if x.elem_count() > 0 {
                transfer.outgoing.push((slot, x));
            }
            if items(rank) > 0 {
                transfer.incoming.push((slot, items(rank)));
                senders.push(rank);
            }
        }
        for (rank, arrived) in senders.into_iter().zip(self.carry_out(transfer)) {
            all[rank] = arrived;
        }
        all[own_rank] = own;
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
        let headers = self.swap(|_| Ok(header.clone()), |_| 2)?;
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
        let texts = self.swap(|_| Ok(own.clone()), |_| TEXT_BYTES)?;
        let texts: Vec<Vec<u8>> = texts.iter().map(Tensor::to_vec1).collect::<Result<_>>()?;
        Ok(disagreement(self.site, other, |rank| texts[rank].clone()))
    }

    /// The reduction of all members' `x`, which has one dimension; of a large one each member makes
    /// a part.
    fn reduce(&self, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let items = x.elem_count();
        if items * x.dtype().size_in_bytes() <= SMALL_BYTES {
            return elementwise::reduced(&self.swap(|_| Ok(x.clone()), |_| items)?, reduction);
        }
        let part = |rank| balanced(items, rank, self.site.size());
        let own_items = part(self.site.rank).len();
        let summands =
            self.swap(|to| x.narrow(0, part(to).start, part(to).len()), |_| own_items)?;
        let sum = elementwise::reduced(&summands, reduction)?;
        // Freed before as much memory is asked for again.
        drop(summands);
        Tensor::cat(&self.swap(|_| Ok(sum.clone()), |from| part(from).len())?, 0)
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

    fn reduce_lists(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        wanted: &[usize],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        let Some((call, _)) = self.0.enter(site, &list, 0)? else {
            return wanted.iter().map(|&n| copied(&list[n])).collect();
        };
        // Each process has one device, and all of them want all sums.
        let mut sums = BTreeMap::new();
        for bucket in lists::buckets(&list) {
            let sum = call.reduce(&lists::joined(&list, &bucket)?, reduction)?;
            sums.extend(lists::cut(&list, &bucket, &sum)?);
        }
        let sum = |n: &usize| match sums.get(n) {
            Some(sum) => Ok(sum.clone()),
            None => bail!("there is no tensor {n} to sum"),
        };
        wanted.iter().map(sum).collect()
    }

    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Vec<Tensor>> {
        let own_size = match site.call.free_dim {
            Some(dim) => number(x.dims()[dim]),
            None => 0,
        };
        let Some((call, sizes)) = self.0.enter(site, slice::from_ref(x), own_size)? else {
            return Ok(vec![copied(x)?]);
        };
        let shapes: Vec<Vec<usize>> =
            sizes.iter().map(|&size| call.shape(x, size)).collect::<Result<_>>()?;
        let own = flat(&copied(x)?)?;
        let parts = call.swap(|_| Ok(own.clone()), |from| shapes[from].iter().product())?;
        parts.iter().zip(shapes).map(|(part, shape)| part.reshape(shape)).collect()
    }

    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let Some((call, _)) = self.0.enter(site, &parts, 0)? else {
            return parts.iter().map(copied).collect();
        };
        let own = &parts[site.rank];
        let arrived = call.swap(|to| flat(&copied(&parts[to])?), |_| own.elem_count())?;
        arrived.into_iter().map(|part| part.reshape(own.shape())).collect()
    }

    fn receive(&self, site: &Site, x: &Tensor, from: Option<usize>) -> Result<Option<Tensor>> {
        let sender = match from {
            Some(rank) => number(rank),
            None => NOBODY,
        };
        let Some((call, senders)) = self.0.enter(site, slice::from_ref(x), sender)? else {
            return from.map(|_| copied(x)).transpose();
        };
        let own = flat(x)?;
        let wants = |rank: usize| senders[rank] == number(site.rank);
        let arrived = call.swap(
            |to| if wants(to) { Ok(own.clone()) } else { own.narrow(0, 0, 0) },
            |sender| if from == Some(sender) { own.elem_count() } else { 0 },
        )?;
        match from {
            None => Ok(None),
            // Its own would change with the argument.
            Some(from) if from == site.rank => Ok(Some(copied(x)?)),
            Some(from) => Ok(Some(arrived[from].reshape(x.shape())?)),
        }
    }

    fn barrier(&self, site: &Site) -> Result<()> {
        self.0.enter(site, &[], 0).map(drop)
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
