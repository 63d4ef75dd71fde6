//! The engine of a mesh of processes: each process is one slot, and the processes communicate
//! through MPI.
//!
//! All data move in nonblocking messages between two ranks. MPI's reductions are not used: their
//! summation order depends on the number of ranks, the size and the library, and they do not
//! support half-precision types.

mod backoff;
mod bytes;
mod header;
mod in_flight;
mod messages;
mod point_to_point;
mod rounds;
mod session;
mod stream;
mod sums;
mod transfer;

use std::{
    collections::BTreeMap,
    fmt, mem,
    sync::{Arc, Mutex, atomic::AtomicUsize},
    time::Duration,
};

use candle_core::{Device, Result, Tensor};
use ferrompi::Communicator;

pub(crate) use self::session::MpiSession;
use self::{
    bytes::with_bytes,
    in_flight::InFlightList,
    rounds::{GatherRound, MpiRound, SumRound},
    session::to_mpi_rank,
    transfer::MpiCall,
};
use crate::{
    axes::AxisSet,
    device::to_device::{contiguous_copy, to_host},
    engine::{
        AllgatherPurpose, Backend, Engine, GatheredTensors, GroupContext, ListRequest,
        PendingCollective, SendReceive,
        processes::{self, CurrentCall, ProcessSlot},
        traffic::TrafficCounter,
    },
    error::{self, Error, ProcessError},
    grid::Topology,
    reduce::Reduction,
    sync::lock,
};

/// The largest number of axes longer than 1. Each set of such axes has a communicator, so a mesh
/// has at most 63 of the 256 communicators that ferrompi allows, and four meshes can exist at a
/// time.
const MAX_AXES: usize = 6;

/// This process's slot and its connection to the others.
#[derive(Clone, Debug)]
pub(crate) struct Mpi(Arc<MpiInner>);

struct MpiInner {
    topology: Arc<Topology>,
    slot: usize,
    deadline: Duration,
    /// The communicator of this slot's group along each set of axes longer than 1.
    groups: BTreeMap<AxisSet, Communicator>,
    counters: [TrafficCounter; 1],
    /// The running collective. MPI allows one call at a time.
    current: CurrentCall,
    /// The mismatch that a collective of this call has returned, if any. Kept because the replica
    /// may ignore the error, but the call must not succeed.
    disagreement: Mutex<Option<String>>,
    /// The receive buffer for headers and small data, reused between calls like `parts`. Both are
    /// arrays of words, so that items of any type are aligned. Lock `inbox` before `parts`. Neither
    /// lock is ever contended, since one collective runs at a time.
    inbox: Mutex<Vec<u64>>,
    /// The receive buffer for summands of other ranks.
    parts: Mutex<Vec<u64>>,
    /// The collectives in flight. Dropped before the session, because their requests must be freed
    /// before MPI is finalized.
    in_flight: Mutex<InFlightList>,
    /// The number of collectives in `in_flight`, so that most calls need not lock the list.
    n_in_flight: AtomicUsize,
    /// Dropped after all other fields.
    session: Arc<MpiSession>,
}

impl fmt::Debug for MpiInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mpi")
            .field("slot", &self.slot)
            .field("session", &self.session)
            .finish_non_exhaustive()
    }
}

impl Drop for MpiInner {
    fn drop(&mut self) {
        self.session.free_later(mem::take(&mut self.groups).into_values());
    }
}

impl Mpi {
    /// Builds the backend of this process's slot, with a communicator for each of its groups. All
    /// processes call this.
    pub(crate) fn new(
        session: Arc<MpiSession>,
        topology: Arc<Topology>,
        deadline: Duration,
    ) -> error::Result<Self> {
        let slots = topology.slots();
        let processes = session.size();
        if processes != slots {
            return Err(mpi_error(format!(
                "MPI has {processes} processes, but the mesh has {slots} slots: start the program with \
                 mpirun -n {slots}"
            )));
        }
        let long = topology.axes_longer_than_one();
        if long.count_ones() as usize > MAX_AXES {
            return Err(mpi_error(format!("a mesh has up to {MAX_AXES} axes longer than 1")));
        }
        let slot = session.rank();
        let groups = session.with_exclusive_mpi(|| groups(&session, &topology, slot))?;
        Ok(Self(Arc::new(MpiInner {
            topology,
            slot,
            deadline,
            groups,
            counters: Default::default(),
            current: CurrentCall::default(),
            disagreement: Mutex::default(),
            inbox: Mutex::default(),
            parts: Mutex::default(),
            in_flight: Mutex::default(),
            n_in_flight: AtomicUsize::new(0),
            session,
        })))
    }

    /// Enters a collective; returns `None` for a group of one.
    fn enter<'a>(&'a self, ctx: &'a GroupContext) -> Result<Option<MpiCall<'a>>> {
        let engine = &*self.0;
        let guard = engine.current.enter(ctx)?;
        engine.progress();
        if ctx.size() == 1 {
            return Ok(None);
        }
        let set = engine.topology.axes_longer_than_one() & ctx.call.axis_set;
        Ok(Some(MpiCall { engine, ctx, comm: &engine.groups[&set], _guard: guard }))
    }
}

/// Returns the round of a collective on lists of tensors, and the tensors that all members pass with
/// equal dtypes and shapes.
fn round(ctx: &GroupContext, work: ListRequest) -> Result<(Box<dyn MpiRound>, Vec<Tensor>)> {
    Ok(match work {
        // All members have the same layout, but different runs.
        ListRequest::Gather { own, layout, device } => {
            (Box::new(GatherRound::new(&own, ctx.rank, layout, device)?), Vec::new())
        }
        ListRequest::Sum { list, runs_by_rank } => {
            (Box::new(SumRound::new(&list, ctx.rank, runs_by_rank)?), list)
        }
    })
}

/// Creates the communicator of a slot's group along each set of axes longer than 1.
fn groups(
    session: &MpiSession,
    topology: &Topology,
    slot: usize,
) -> error::Result<BTreeMap<AxisSet, Communicator>> {
    let long = topology.axes_longer_than_one();
    // Every process must split the world in the same order of sets.
    let mut groups = BTreeMap::new();
    for set in (1..=long).filter(|set| set & !long == 0) {
        let span = topology.groups(set).position(slot);
        let split = session.world.split(Some(to_mpi_rank(span.group)), to_mpi_rank(span.rank));
        let comm = split.map_err(|error| mpi_error(error.to_string()))?;
        groups.insert(set, comm.ok_or_else(|| mpi_error("no communicator was made".into()))?);
    }
    Ok(groups)
}

fn mpi_error(reason: String) -> Error {
    ProcessError::Mpi { reason }.into()
}

impl Backend for Mpi {
    fn begin(&self) -> Vec<Arc<dyn Engine>> {
        *lock(&self.0.disagreement) = None;
        vec![Arc::new(self.clone())]
    }

    fn counters(&self) -> &[TrafficCounter] {
        &self.0.counters
    }

    fn check_caller(&self) -> error::Result<(), ProcessError> {
        self.0.session.check_caller()
    }

    fn process_allgather(
        &self,
        purpose: AllgatherPurpose,
        lists: error::Result<Vec<Vec<Tensor>>>,
    ) -> error::Result<Vec<Vec<Tensor>>> {
        let MpiInner { topology, slot, .. } = &*self.0;
        let process = ProcessSlot { topology, slot: *slot, device: &Device::Cpu };
        processes::process_allgather(self, &process, purpose, lists)
    }
}

impl Engine for Mpi {
    #[expect(clippy::expect_used, reason = "groups of one are served without an engine")]
    fn all_reduce(
        &self,
        ctx: &GroupContext,
        list: &[Tensor],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        let call = self.enter(ctx)?.expect("a group of several members");
        let host: Vec<Tensor> = list.iter().map(to_host).collect::<Result<_>>()?;
        let sums = match &host[..] {
            [x] => vec![call.reduce_one(x, reduction)?],
            _ => call.reduce_list(&host, reduction)?,
        };
        sums.iter().zip(list).map(|(sum, x)| sum.to_device(x.device())).collect()
    }

    fn all_gather(&self, ctx: &GroupContext, x: &Tensor) -> Result<GatheredTensors> {
        let Some(call) = self.enter(ctx)? else {
            return Ok(GatheredTensors::Parts(vec![contiguous_copy(x)?]));
        };
        let host = to_host(x)?;
        let (items, shapes) = with_bytes(&host, |bytes| call.gather(&host, bytes))?;
        Ok(GatheredTensors::Concatenated { items: items.to_device(x.device())?, shapes })
    }

    fn all_to_all(&self, ctx: &GroupContext, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let Some(call) = self.enter(ctx)? else {
            return parts.iter().map(contiguous_copy).collect();
        };
        // Copy the parts: a second read lock on the same storage deadlocks if another thread
        // requests the write lock after the first.
        let host: Vec<Tensor> =
            parts.iter().map(|part| contiguous_copy(&to_host(part)?)).collect::<Result<_>>()?;
        let arrived = call.swap(&host)?;
        arrived.iter().map(|part| part.to_device(parts[ctx.rank].device())).collect()
    }

    fn send_receive(
        &self,
        ctx: &GroupContext,
        message: &SendReceive<'_>,
    ) -> Result<Option<Tensor>> {
        let SendReceive { x, is_sent, from } = *message;
        let Some(call) = self.enter(ctx)? else {
            return from.map(|_| contiguous_copy(x)).transpose();
        };
        let received = if is_sent {
            let host = to_host(x)?;
            with_bytes(&host, |bytes| call.receive(x, bytes, from))?
        } else {
            call.receive(x, &[], from)?
        };
        received.map(|received| received.to_device(x.device())).transpose()
    }

    fn run_list(&self, ctx: &GroupContext, work: ListRequest) -> Result<Vec<Tensor>> {
        let (round, tensors) = round(ctx, work)?;
        self.run_collective(ctx, &tensors, round)
    }

    fn start_list(
        &self,
        ctx: &GroupContext,
        work: ListRequest,
    ) -> Result<Box<dyn PendingCollective>> {
        let (round, tensors) = round(ctx, work)?;
        Ok(Box::new(self.start_collective(ctx, &tensors, round)?))
    }

    fn barrier(&self, ctx: &GroupContext) -> Result<()> {
        let Some(call) = self.enter(ctx)? else { return Ok(()) };
        call.exchange_headers(&[], 0, &[]).map(drop)
    }

    fn counter(&self) -> &TrafficCounter {
        &self.0.counters[0]
    }

    fn finish(&self) {
        if let Some(reason) = lock(&self.0.disagreement).take() {
            session::exit_all(&self.0.session.world, &reason);
        }
        if let Err(error) = processes::final_barrier(self, &self.0.topology, self.0.slot) {
            session::exit_all(&self.0.session.world, &error.to_string());
        }
    }

    /// Ends the program: the other processes wait in MPI, and nothing else ends their wait.
    fn fail(&self, error: Error) {
        session::exit_all(&self.0.session.world, &error.to_string());
    }

    /// Returns `None`, because a failing replica ends the program.
    fn failure(&self) -> Option<Error> {
        None
    }
}
