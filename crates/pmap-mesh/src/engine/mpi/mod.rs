//! The engine of many processes: each is one slot, and they talk through MPI.
//!
//! Everything goes from process to process with nonblocking messages, nothing through MPI's
//! reductions: their order of summation depends on the number of ranks, the size and the library,
//! and they know no halves.

mod bytes;
mod lists;
mod moves;
mod session;
mod sums;
mod transfer;
mod wire;

use std::{
    collections::BTreeMap,
    fmt, slice,
    sync::{Arc, Mutex},
    time::Duration,
};

use candle_core::{Device, Result, Tensor};
use ferrompi::Communicator;

pub(crate) use self::session::Session;
use self::{
    bytes::{buffer, with_bytes},
    transfer::{Call, rank_of},
};
use crate::{
    engine::{
        Backend, Engine, Site,
        processes::{self, Current},
    },
    error::{self, Error, ProcessError},
    mesh::{
        DeviceMesh, DeviceMeshBuilder,
        axes::AxisSet,
        place::{copied, on_host},
        topology::Topology,
    },
    reduce::{self, Reduction},
};

/// Each set of axes longer than 1 has a communicator of its own: 63 of the 256 that ferrompi holds,
/// so that four meshes may live at a time.
const MAX_AXES: usize = 6;

impl DeviceMeshBuilder {
    /// Makes the mesh of all processes that MPI has started, one slot each, by rank; this one's
    /// runs on `device`.
    ///
    /// Every process makes the same mesh and calls the same functions with the same arguments, and
    /// takes its own shard of them; results come back to all of them. All compute the same: sums
    /// are formed in rank order. A replica that fails ends all processes, with its error on the
    /// standard error of its own, since the others may wait for it: there is no call that returns
    /// an error for it.
    ///
    /// Neither is there a panic that one process survives: from the first mesh over MPI on, a panic on
    /// any thread of a process ends all of them, also one that the program would catch by
    /// [`catch_unwind`](std::panic::catch_unwind) or by joining its thread. A rank that unwinds would
    /// wait for the others when MPI ends, and they for it.
    ///
    /// A mesh without axes is a row named [`DeviceMesh::AXIS`].
    ///
    /// # Errors
    ///
    /// Those of [`devices`](Self::devices), and [`ProcessError::Mpi`] if MPI cannot be started, or
    /// a second time, has not as many processes as the mesh has slots, or grants its calls to one
    /// thread only.
    pub fn mpi(self, device: Device) -> error::Result<DeviceMesh> {
        let session = Session::start()?;
        let slot = session.rank();
        let processes = session.size();
        processes::mesh(self, slot, processes, device, |topology, deadline, _| {
            Ok(Arc::new(Mpi::new(session, Arc::clone(topology), deadline)?))
        })
    }
}

/// This process's slot and its access to the others.
#[derive(Clone, Debug)]
pub(crate) struct Mpi(Arc<Inner>);

struct Inner {
    topology: Arc<Topology>,
    slot: usize,
    deadline: Duration,
    /// The communicator of this slot's group along each set of axes longer than 1.
    groups: BTreeMap<AxisSet, Communicator>,
    /// MPI takes one call at a time.
    current: Current,
    /// What arrives with headers. Kept from call to call, as `parts`; in words, so that any items
    /// may lie in it. Of the two locks, this one is taken first; neither is ever contended, since
    /// one collective runs at a time.
    inbox: Mutex<Vec<u64>>,
    /// What others send to be added up here.
    parts: Mutex<Vec<u64>>,
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

impl Mpi {
    /// The backend of this process's slot, and a communicator for each group it is in. All
    /// processes call this.
    fn new(
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
        let mut groups = BTreeMap::new();
        // In the same order everywhere, the numbers of sets.
        for set in (1..=long).filter(|set| set & !long == 0) {
            let place = topology.groups(set).place(slot);
            let comm = session
                .world
                .split(Some(rank_of(place.group)), rank_of(place.rank))
                .map_err(|error| mpi(error.to_string()))?;
            groups.insert(set, comm.ok_or_else(|| mpi("no communicator was made".into()))?);
        }
        Ok(Self(Arc::new(Inner {
            topology,
            slot,
            deadline,
            groups,
            current: Current::default(),
            inbox: Mutex::default(),
            parts: Mutex::default(),
            session,
        })))
    }

    /// Enters a collective; `None` for a group of one.
    fn enter<'a>(&'a self, site: &'a Site) -> Result<Option<Call<'a>>> {
        let engine = &*self.0;
        let guard = engine.current.enter(site)?;
        if site.size() == 1 {
            return Ok(None);
        }
        let set = engine.topology.long_axes() & site.call.set;
        Ok(Some(Call { engine, site, comm: &engine.groups[&set], _guard: guard }))
    }
}

fn mpi(reason: String) -> Error {
    ProcessError::Mpi { reason }.into()
}

impl Backend for Mpi {
    fn begin(&self) -> Vec<Arc<dyn Engine>> {
        vec![Arc::new(self.clone())]
    }

    fn process_allgather(&self, lists: Vec<Vec<Tensor>>) -> error::Result<Vec<Vec<Tensor>>> {
        processes::process_allgather(self, &self.0.topology, self.0.slot, &Device::Cpu, &lists[0])
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

    fn reduce_lists(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        wanted: &[usize],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        let flags = lists::flags(list.len(), wanted)?;
        let Some(call) = self.enter(site)? else {
            return wanted.iter().map(|&n| copied(&list[n])).collect();
        };
        let on_host: Vec<Tensor> = list.iter().map(on_host).collect::<Result<_>>()?;
        let sums = call.reduce_list(&on_host, &flags, reduction)?;
        wanted.iter().map(|n| sums[n].to_device(list[*n].device())).collect()
    }

    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Vec<Tensor>> {
        let Some(call) = self.enter(site)? else { return Ok(vec![copied(x)?]) };
        let host = on_host(x)?;
        let gathered = with_bytes(&host, |bytes| call.gather(&host, bytes))?;
        gathered.iter().map(|part| part.to_device(x.device())).collect()
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

    fn receive(&self, site: &Site, x: &Tensor, from: Option<usize>) -> Result<Option<Tensor>> {
        let Some(call) = self.enter(site)? else {
            return from.map(|_| copied(x)).transpose();
        };
        let host = on_host(x)?;
        let received = with_bytes(&host, |bytes| call.receive(&host, bytes, from))?;
        from.map(|_| received.tensor(host.dims())?.to_device(x.device())).transpose()
    }

    fn barrier(&self, site: &Site) -> Result<()> {
        let Some(call) = self.enter(site)? else { return Ok(()) };
        call.exchange_headers(&[], 0, &[]).map(drop)
    }

    fn finish(&self) {
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
