//! The engine of a mesh of processes that have one GPU each: NCCL moves tensors from device to
//! device.
//!
//! All data move in sends from one rank to another, and the device adds received items. NCCL's
//! reductions are not used, because their summation order depends on the number of ranks, the size
//! and the network. All groups share a communicator: NCCL lets some of its ranks exchange data without
//! the others.
//!
//! In every collective, each member first sends a header to the other members: a hash of everything
//! that must agree, so that no member waits for data that another member does not send. A replica
//! waits for headers; its device waits for data. Started collectives use a second communicator, and a
//! thread that waits for their headers while the replica computes (ADR 17).

mod comm_thread;
mod exchange;
mod link;
mod list_ops;
mod peers;
mod store;
#[cfg(test)]
mod tests;

use std::{
    path::Path,
    slice,
    sync::{Arc, OnceLock, mpsc::RecvTimeoutError},
    time::Duration,
};

use candle_core::{CudaDevice, Device, Result, Tensor, bail};
use core_types::Placement;

use self::{
    comm_thread::{CommThread, StartedReceiver},
    exchange::{ExitHandler, NcclCall, NcclChannel, deadline_error, empty_tensor},
    link::{NcclLink, is_supported, new_id},
    list_ops::{NcclListOp, concat_flat, flat, reduce_list},
    peers::PeerInfo,
    store::{CommId, MeshBootstrap, bootstrap},
};
use crate::{
    axes::ALL,
    device::to_device::contiguous_copy,
    engine::{
        AllgatherPurpose, Backend, Engine, GatheredTensors, GroupContext, ListRequest,
        PendingCollective, SendReceive,
        processes::{self, CallGuard, CurrentCall, ProcessSlot, call_hash, description},
        traffic::TrafficCounter,
    },
    error::{self, Error, ProcessError},
    grid::{PROCESS_DEADLINE, Topology},
    reduce::Reduction,
};

/// Time limit for the processes to connect at the start of a mesh. As long as the default deadline of
/// a collective.
const JOIN_TIME: Duration = PROCESS_DEADLINE;

/// The sender rank in a header of a member that receives nothing.
const NO_SENDER: i64 = -1;

/// This process's slot and its connection to the others.
#[derive(Clone, Debug)]
pub(crate) struct Nccl(Arc<NcclInner>);

#[derive(Debug)]
struct NcclInner {
    topology: Arc<Topology>,
    slot: usize,
    device: Device,
    counters: [TrafficCounter; 1],
    /// The collective that the replica is in: calling, starting or waiting for. It guards against a
    /// second thread of this process, since NCCL does not tell the messages of two collectives apart.
    current: CurrentCall,
    /// The channel of collectives that the replica waits for at once.
    blocking: NcclChannel,
    /// The thread of started collectives. Dropped before its channel.
    comm_thread: CommThread,
    /// The channel of started collectives.
    background: Arc<NcclChannel>,
    exit: ExitHandler,
}

impl Nccl {
    /// Builds the backend of this process's slot. All processes call this.
    pub(crate) fn new(
        place: Placement,
        device: &Device,
        store: &Path,
        topology: Arc<Topology>,
        deadline: Duration,
    ) -> error::Result<Self> {
        let processes = place.world_size().as_usize();
        let slots = topology.slots();
        if processes != slots {
            return Err(nccl_error(format!(
                "{processes} processes do not fill a mesh of {slots} slots"
            )));
        }
        let cuda = device.as_cuda_device().map_err(|error| nccl_error(error.to_string()))?;
        let bootstrap = bootstrap(store, place, PeerInfo::on(cuda), JOIN_TIME, || {
            Ok([new_id().map_err(nccl_error)?, new_id().map_err(nccl_error)?])
        })?;
        let exit = ExitHandler { slot: place.rank().as_usize() };
        let [blocking_id, background_id] = bootstrap.ids;
        let mut blocking = open_channel(cuda, place, blocking_id, &exit)?;
        let mut background = open_channel(cuda, place, background_id, &exit)?;
        // All processes have joined. Remove the ids now, before a process can look for the ids of
        // its next mesh.
        drop::<MeshBootstrap>(bootstrap);
        for channel in [&blocking, &background] {
            // Connect now, so that the connection does not count against the time limit of the
            // first collective.
            barrier_all(channel, &topology, "the start of the mesh")
                .map_err(|error| nccl_error(error.to_string()))?;
        }
        blocking.header_timeout = deadline;
        blocking.deadline = deadline;
        // There is no time limit for these headers, because the replica computes in the meantime.
        // `NcclHandle::wait` has the limit.
        background.header_timeout = Duration::MAX;
        background.deadline = deadline;
        Ok(Self(Arc::new(NcclInner {
            topology,
            slot: exit.slot,
            device: device.clone(),
            counters: Default::default(),
            current: CurrentCall::default(),
            blocking,
            comm_thread: CommThread::new().map_err(|error| nccl_error(error.to_string()))?,
            background: Arc::new(background),
            exit,
        })))
    }
}

/// Opens a channel with its own communicator, which all processes join.
fn open_channel(
    cuda: &CudaDevice,
    place: Placement,
    id: CommId,
    exit: &ExitHandler,
) -> error::Result<NcclChannel> {
    let end = exit.clone();
    let link = NcclLink::join(cuda, place, id, JOIN_TIME, move |reason| end.end(reason))
        .map_err(nccl_error)?;
    Ok(NcclChannel {
        link: Box::new(link),
        header_timeout: JOIN_TIME,
        deadline: JOIN_TIME,
        exit: exit.clone(),
        broken: OnceLock::new(),
    })
}

/// Waits until all slots of the mesh have called this function.
fn barrier_all(channel: &NcclChannel, topology: &Topology, op: &'static str) -> Result<()> {
    let ctx = GroupContext::new(ALL, topology, channel.exit.slot, op, None);
    let ctx = ctx.map_err(candle_core::Error::wrap)?;
    if ctx.size() == 1 {
        return Ok(());
    }
    let hash = call_hash(&ctx.call, &[]);
    NcclCall { channel, ctx: &ctx }
        .exchange_headers(hash, 0, || description(&ctx.call, &[]))
        .map(drop)
}

fn nccl_error(reason: String) -> Error {
    ProcessError::Nccl { reason }.into()
}

impl Backend for Nccl {
    fn begin(&self) -> Vec<Arc<dyn Engine>> {
        vec![Arc::new(self.clone())]
    }

    fn counters(&self) -> &[TrafficCounter] {
        &self.0.counters
    }

    fn process_allgather(
        &self,
        purpose: AllgatherPurpose,
        lists: error::Result<Vec<Vec<Tensor>>>,
    ) -> error::Result<Vec<Vec<Tensor>>> {
        let NcclInner { topology, slot, device, .. } = &*self.0;
        let process = ProcessSlot { topology, slot: *slot, device };
        processes::process_allgather(self, &process, purpose, lists)
    }
}

impl NcclInner {
    /// Enters a collective on some tensors. Returns the collective with the second header word of
    /// each member, by rank, or `None` for a group of one. The word is the size of the member's tensor
    /// in the free dimension (`all_gather`), the rank it receives from (`send_receive`), or 0.
    ///
    /// # Errors
    ///
    /// On all members, if they call different collectives. On this member, if a tensor cannot be
    /// sent.
    fn enter<'a>(
        &'a self,
        ctx: &'a GroupContext,
        tensors: &[Tensor],
        header_value: i64,
    ) -> Result<Option<(NcclCall<'a>, Vec<i64>, CallGuard<'a>)>> {
        let guard = self.current.enter(ctx)?;
        tensors.iter().try_for_each(|x| self.check_sendable(ctx, x))?;
        if ctx.size() == 1 {
            return Ok(None);
        }
        let call = NcclCall { channel: &self.blocking, ctx };
        let hash = call_hash(&ctx.call, tensors);
        let text = || description(&ctx.call, tensors);
        let header_values = call.exchange_headers(hash, header_value, text)?;
        Ok(Some((call, header_values, guard)))
    }

    fn check_sendable(&self, ctx: &GroupContext, x: &Tensor) -> Result<()> {
        if !x.device().same_device(&self.device) {
            // Both may have the same index, since candle distinguishes two handles of one device.
            bail!(
                "the tensor of {} is on {:?}, but NCCL needs it on the device of its replica, {:?}",
                ctx.call,
                x.device().location(),
                self.device.location()
            );
        }
        if !is_supported(x.dtype()) {
            bail!(
                "tensors of type {} cannot be sent over NCCL; convert them, for example to i64 or f32",
                x.dtype().as_str()
            );
        }
        Ok(())
    }

    /// Checks and packs the arguments of a collective on lists. Returns the packed collective, and
    /// the hash and the description that the members compare.
    fn prepare(&self, ctx: &GroupContext, work: ListRequest) -> Result<(NcclListOp, u64, Vec<u8>)> {
        let list = match &work {
            ListRequest::Gather { own, .. } => {
                own.iter().try_for_each(|x| self.check_sendable(ctx, x))?;
                // Not compared: each rank has other runs. The layout's fingerprint, in the call's
                // detail, is.
                &[]
            }
            ListRequest::Sum { list, .. } => {
                list.iter().try_for_each(|x| self.check_sendable(ctx, x))?;
                &list[..]
            }
        };
        let hash = call_hash(&ctx.call, list);
        let text = description(&ctx.call, list);
        Ok((NcclListOp::new(ctx, work)?, hash, text))
    }
}

/// The handle of a started collective.
#[derive(Debug)]
struct NcclHandle {
    nccl: Nccl,
    ctx: GroupContext,
    started: StartedReceiver,
}

impl PendingCollective for NcclHandle {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        let engine = &*self.nccl.0;
        let _guard = engine.current.enter(&self.ctx)?;
        let deadline = engine.background.deadline;
        match self.started.recv_timeout(deadline) {
            Ok(list_op) => list_op?.finish(),
            Err(RecvTimeoutError::Timeout) => {
                engine.exit.end(&deadline_error(&self.ctx, deadline).to_string())
            }
            Err(RecvTimeoutError::Disconnected) => {
                bail!("the thread of started collectives has ended")
            }
        }
    }
}

impl Engine for Nccl {
    #[expect(clippy::expect_used, reason = "groups of one are served without an engine")]
    fn all_reduce(
        &self,
        ctx: &GroupContext,
        list: &[Tensor],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        let entered = self.0.enter(ctx, list, 0)?;
        let (call, _, _guard) = entered.expect("a group of several members");
        call.carry_out(|| reduce_list(&call, list, reduction))
    }

    fn all_gather(&self, ctx: &GroupContext, x: &Tensor) -> Result<GatheredTensors> {
        let own_size = match ctx.call.free_dim {
            Some(dim) => to_word(x.dims()[dim]),
            None => 0,
        };
        let Some((call, sizes, _guard)) = self.0.enter(ctx, slice::from_ref(x), own_size)? else {
            return Ok(GatheredTensors::Parts(vec![contiguous_copy(x)?]));
        };
        call.carry_out(|| {
            let shapes: Vec<Vec<usize>> =
                sizes.iter().map(|&size| gathered_shape(ctx, x, size)).collect::<Result<_>>()?;
            let own_items = x.elem_count();
            let parts = call.exchange_items(
                flat(x)?,
                |_| 0..own_items,
                |from: usize| shapes[from].iter().product(),
            )?;
            let tensors = parts.iter().zip(shapes).map(|(part, shape)| part.reshape(shape));
            Ok(GatheredTensors::Parts(tensors.collect::<Result<_>>()?))
        })
    }

    fn all_to_all(&self, ctx: &GroupContext, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let Some((call, _, _guard)) = self.0.enter(ctx, &parts, 0)? else {
            return parts.iter().map(contiguous_copy).collect();
        };
        call.carry_out(|| {
            let shape = parts[ctx.rank].shape();
            let n_items = shape.elem_count();
            let flat_parts: Vec<Tensor> = parts.iter().map(flat).collect::<Result<_>>()?;
            let source = concat_flat(&flat_parts, parts[0].dtype(), &self.0.device)?;
            let arrived =
                call.exchange_items(source, |to| to * n_items..(to + 1) * n_items, |_| n_items)?;
            arrived.into_iter().map(|part| part.reshape(shape)).collect()
        })
    }

    fn send_receive(
        &self,
        ctx: &GroupContext,
        message: &SendReceive<'_>,
    ) -> Result<Option<Tensor>> {
        let SendReceive { x, is_sent, from } = *message;
        let sender = match from {
            Some(rank) => to_word(rank),
            None => NO_SENDER,
        };
        let Some((call, senders, _guard)) = self.0.enter(ctx, slice::from_ref(x), sender)? else {
            // A group of one: the only possible sender is this member.
            return from.map(|_| contiguous_copy(x)).transpose();
        };
        let n_items = x.elem_count();
        let own_rank = to_word(ctx.rank);
        let arrived = call.carry_out(|| {
            let source = if is_sent { flat(x)? } else { empty_tensor(x.dtype(), x.device())? };
            call.exchange_items(
                source,
                |to| if senders[to] == own_rank { 0..n_items } else { 0..0 },
                |sender| if from == Some(sender) { n_items } else { 0 },
            )
        })?;
        match from {
            None => Ok(None),
            // Copy this rank's tensor, so that writes into the argument do not change the result.
            Some(from) if from == ctx.rank => Ok(Some(contiguous_copy(x)?)),
            Some(from) => Ok(Some(arrived[from].reshape(x.shape())?)),
        }
    }

    fn run_list(&self, ctx: &GroupContext, work: ListRequest) -> Result<Vec<Tensor>> {
        let _guard = self.0.current.enter(ctx)?;
        let (mut list_op, hash, text) = self.0.prepare(ctx, work)?;
        let call = NcclCall { channel: &self.0.blocking, ctx };
        call.exchange_headers(hash, 0, || text)?;
        call.carry_out(|| {
            list_op.start(&call);
            Ok(())
        })?;
        list_op.finish()
    }

    fn start_list(
        &self,
        ctx: &GroupContext,
        work: ListRequest,
    ) -> Result<Box<dyn PendingCollective>> {
        let _guard = self.0.current.enter(ctx)?;
        let (list_op, hash, text) = self.0.prepare(ctx, work)?;
        let channel = Arc::clone(&self.0.background);
        let own_ctx = ctx.clone();
        let started = self.0.comm_thread.queue_start(list_op, move |list_op| {
            let call = NcclCall { channel: &channel, ctx: &own_ctx };
            call.exchange_headers(hash, 0, || text)?;
            call.carry_out(|| {
                list_op.start(&call);
                Ok(())
            })
        });
        Ok(Box::new(NcclHandle { nccl: self.clone(), ctx: ctx.clone(), started }))
    }

    /// Waits until all members have called this method, each after its device has finished all
    /// pending work.
    fn barrier(&self, ctx: &GroupContext) -> Result<()> {
        self.0.device.synchronize()?;
        // The exchange of headers is the barrier.
        self.0.enter(ctx, &[], 0).map(drop)
    }

    fn counter(&self) -> &TrafficCounter {
        &self.0.counters[0]
    }

    fn finish(&self) {
        if let Err(error) = processes::final_barrier(self, &self.0.topology, self.0.slot) {
            self.0.exit.end(&error.to_string());
        }
    }

    /// Ends the program: the other processes wait on their devices, and nothing else ends their
    /// wait.
    fn fail(&self, error: Error) {
        self.0.exit.end(&error.to_string());
    }

    /// Returns `None`, because a failing replica ends the program.
    fn failure(&self) -> Option<Error> {
        None
    }
}

/// Returns the shape of a rank's tensor in a gather, given its size in the free dimension, if there is one.
fn gathered_shape(ctx: &GroupContext, x: &Tensor, free_size: i64) -> Result<Vec<usize>> {
    let mut dims = x.dims().to_vec();
    if let Some(dim) = ctx.call.free_dim {
        dims[dim] = usize::try_from(free_size)?;
    }
    Ok(dims)
}

/// Converts a size or a rank to a word of a header.
#[expect(clippy::expect_used, reason = "sizes of tensors in memory fit 63 bits")]
fn to_word(n: usize) -> i64 {
    i64::try_from(n).expect("a size fits")
}
