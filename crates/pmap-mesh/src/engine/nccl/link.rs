//! The thread that owns a communicator and the communicator's stream. A communicator must stay on
//! the thread that created it.
//!
//! The stream is separate from the device's computing stream. It waits for the computation of a
//! transfer's tensors ([`LinkTransfer::ready`]), and computations that use the received tensor wait
//! for the transfer ([`TransferHandle::order`]). cudarc's automatic events on tensors are not
//! enough. candle concatenates tensors by copies into parts of a tensor, which cudarc records as
//! reads, not as writes. And cudarc records only the last reader of a tensor, so a computation with
//! a tensor that is being sent would hide the send. So this module records its own events, and
//! keeps sent tensors until the transfer has ended.
//!
//! cudarc 0.19 does not expose the handle of a communicator, and has no safe call that polls for
//! errors of pending transfers (`ncclCommGetAsyncError`). So the thread polls the events of all
//! transfers, and ends the process if a transfer fails or takes too long.

use std::{
    collections::VecDeque,
    ffi::c_char,
    fmt,
    ops::Range,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor, bail,
    cuda_backend::{
        CudaDType,
        cudarc::{
            driver::{CudaEvent, CudaStream, CudaView, CudaViewMut, DeviceRepr},
            nccl::{Comm, Id as NcclId, NcclType, result::NcclError},
        },
    },
};
use core_types::Placement;
use half::{bf16, f16};

use super::store::CommId;
use crate::{engine::processes::waiting, error::call::CollectiveCall, sync::catch};

/// The time for which a communicator outlives its mesh. The last messages of this process may still
/// be in flight then, and cudarc destroys communicators without waiting for messages. The last
/// messages are headers of some bytes, which arrive within milliseconds.
const LINGER: Duration = Duration::from_millis(200);

/// The interval at which the thread polls for the end of transfers while it has no requests.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The items that this process sends and receives in one transfer. Both tensors are flat,
/// contiguous, of one dtype, and on this process's device.
pub(super) struct LinkTransfer {
    /// The collective that the transfer belongs to.
    pub(super) call: Arc<CollectiveCall>,
    /// An event after the computation of the tensors; `None` on a processor, which computes
    /// synchronously.
    pub(super) ready: Option<Arc<CudaEvent>>,
    /// The items to send. They are in one tensor, because a thread that locked a second storage
    /// could deadlock with a `Var::set` that waits for the first.
    pub(super) source: Tensor,
    /// The receiving slots, each with a non-empty range of items of the source.
    pub(super) outgoing: Vec<(usize, Range<usize>)>,
    /// The tensor for received items; no other code reads it during the transfer.
    pub(super) destination: Tensor,
    /// The sending slots, each with a non-empty range of items of the destination; the ranges are
    /// in order.
    pub(super) incoming: Vec<(usize, Range<usize>)>,
}

/// Why an operation did not complete.
#[derive(Debug)]
pub(super) enum TransferError {
    /// The operation took longer than its time limit.
    Late,
    /// The operation failed for this reason.
    Failed(String),
}

type LinkResult<T> = std::result::Result<T, TransferError>;

/// The transport of messages and tensors between processes, for one process.
pub(super) trait Transport: fmt::Debug + Send + Sync {
    /// Sends `bytes` to each slot of `slots`, and receives as many bytes from each of these slots.
    /// Returns the received bytes in the order of `slots`. Does not wait for the device.
    fn exchange(
        &self,
        bytes: Vec<u8>,
        slots: &[usize],
        timeout: Duration,
    ) -> LinkResult<Vec<Vec<u8>>>;

    /// Starts a transfer, which begins when its tensors are ready.
    fn transfer(
        &self,
        transfer: LinkTransfer,
        timeout: Duration,
    ) -> LinkResult<Box<dyn TransferHandle>>;
}

/// A started transfer. Do not write to its source or read its destination before
/// [`make_device_wait`](Self::make_device_wait).
pub(super) trait TransferHandle: fmt::Debug + Send {
    /// Makes all later work of the device wait for the transfer.
    fn make_device_wait(&self) -> Result<()>;
}

/// A request to the communicator's thread, with a channel for the reply.
enum CommRequest {
    Exchange { bytes: Vec<u8>, slots: Vec<usize>, reply: ReplySender<Vec<Vec<u8>>> },
    Transfer { transfer: LinkTransfer, timeout: Duration, reply: ReplySender<Arc<CudaEvent>> },
}

type ReplySender<T> = mpsc::SyncSender<std::result::Result<T, String>>;

/// This process's connection to the thread that owns the communicator. A caller can stop waiting
/// for that thread at a deadline.
#[derive(Debug)]
pub(super) struct NcclLink {
    /// The computing stream of the device.
    stream: Arc<CudaStream>,
    /// The requests to the owner, which ends when this channel is closed.
    requests: Option<mpsc::Sender<CommRequest>>,
    owner: Option<JoinHandle<()>>,
}

/// Returns the id of a new communicator.
pub(super) fn new_id() -> std::result::Result<CommId, String> {
    let id = catch(NcclId::new)?.map_err(|error| error_name(&error))?;
    Ok(id.internal().map(|item| u8::from_ne_bytes(item.to_ne_bytes())))
}

impl NcclLink {
    /// Joins the communicator with this id, together with all other processes. `end` ends the
    /// process with a reason, if a transfer fails later.
    pub(super) fn join(
        device: &CudaDevice,
        place: Placement,
        id: CommId,
        timeout: Duration,
        end: impl Fn(&str) + Send + 'static,
    ) -> std::result::Result<Self, String> {
        let (started, start) = mpsc::sync_channel(1);
        let (requests, queue) = mpsc::channel::<CommRequest>();
        let stream = device.cuda_stream();
        let computing = Arc::clone(&stream);
        let builder = thread::Builder::new().name("nccl".into());
        let spawned = builder.spawn(move || {
            let comm = match catch(|| open_comm(&computing, place, id)).flatten() {
                Ok(comm) => comm,
                Err(error) => return drop(started.send(Err(error))),
            };
            drop(started.send(Ok(())));
            let mut owner = CommOwner { comm, in_flight: VecDeque::new(), end };
            owner.serve(&queue);
            thread::sleep(if place.world_size().as_u64() > 1 { LINGER } else { Duration::ZERO });
            drop(catch(|| drop(owner)));
        });
        let owner = spawned.map_err(|error| error.to_string())?;
        match start.recv_timeout(timeout) {
            Ok(joined) => {
                joined.map(|()| Self { stream, requests: Some(requests), owner: Some(owner) })
            }
            Err(RecvTimeoutError::Timeout) => {
                Err(format!("not all have joined within {timeout:?}"))
            }
            Err(RecvTimeoutError::Disconnected) => Err(ENDED.into()),
        }
    }

    /// Sends a request to the communicator's thread, and waits for the reply.
    fn request_reply<T>(
        &self,
        timeout: Duration,
        request: impl FnOnce(ReplySender<T>) -> CommRequest,
    ) -> LinkResult<T> {
        let (reply, answer) = mpsc::sync_channel(1);
        let is_sent = match &self.requests {
            Some(requests) => requests.send(request(reply)).is_ok(),
            None => false,
        };
        if !is_sent {
            return Err(TransferError::Failed(ENDED.into()));
        }
        match answer.recv_timeout(timeout) {
            Ok(answer) => answer.map_err(TransferError::Failed),
            Err(RecvTimeoutError::Timeout) => Err(TransferError::Late),
            Err(RecvTimeoutError::Disconnected) => Err(TransferError::Failed(ENDED.into())),
        }
    }
}

impl Transport for NcclLink {
    fn exchange(
        &self,
        bytes: Vec<u8>,
        slots: &[usize],
        timeout: Duration,
    ) -> LinkResult<Vec<Vec<u8>>> {
        self.request_reply(timeout, |reply| CommRequest::Exchange {
            bytes,
            slots: slots.to_vec(),
            reply,
        })
    }

    fn transfer(
        &self,
        transfer: LinkTransfer,
        timeout: Duration,
    ) -> LinkResult<Box<dyn TransferHandle>> {
        let done = self.request_reply(timeout, |reply| CommRequest::Transfer {
            transfer,
            timeout,
            reply,
        })?;
        Ok(Box::new(TransferEnd { stream: Arc::clone(&self.stream), done }))
    }
}

impl Drop for NcclLink {
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Some(owner) = self.owner.take() {
            drop(owner.join());
        }
    }
}

const ENDED: &str = "the thread of the communicator has ended";

/// The handle of a transfer: an event at the transfer's end.
#[derive(Debug)]
struct TransferEnd {
    /// The computing stream of the device.
    stream: Arc<CudaStream>,
    done: Arc<CudaEvent>,
}

impl TransferHandle for TransferEnd {
    fn make_device_wait(&self) -> Result<()> {
        self.stream.wait(&self.done).map_err(candle_core::Error::wrap)
    }
}

/// The state of the communicator's thread.
struct CommOwner<E> {
    comm: Comm,
    /// Transfers in flight, in their order on the stream.
    in_flight: VecDeque<PendingTransfer>,
    end: E,
}

struct PendingTransfer {
    /// Kept until the end of the transfer, so that the memory of its tensors is not reused earlier.
    transfer: LinkTransfer,
    done: Arc<CudaEvent>,
    start: Instant,
    timeout: Duration,
}

impl<E: Fn(&str)> CommOwner<E> {
    /// Serves requests until all senders are gone and all transfers have ended.
    fn serve(&mut self, queue: &mpsc::Receiver<CommRequest>) {
        while let Some(request) = self.next_request(queue) {
            match request {
                // The requester may have stopped waiting.
                CommRequest::Exchange { bytes, slots, reply } => {
                    drop(reply.send(catch(|| self.exchange(&bytes, &slots)).flatten()));
                }
                CommRequest::Transfer { transfer, timeout, reply } => {
                    drop(reply.send(catch(|| self.start(transfer, timeout)).flatten()));
                }
            }
        }
        while self.poll_transfers() {
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits for the next request, and polls transfers in the meantime. Returns `None` if all
    /// senders are gone.
    fn next_request(&mut self, queue: &mpsc::Receiver<CommRequest>) -> Option<CommRequest> {
        while self.poll_transfers() {
            match queue.recv_timeout(POLL_INTERVAL) {
                Ok(request) => return Some(request),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        queue.recv().ok()
    }

    /// Removes the transfers that have ended. Returns true if any transfer is still in flight. Ends
    /// the process if a transfer has failed or has passed its time limit.
    fn poll_transfers(&mut self) -> bool {
        while let Some(PendingTransfer { transfer, done, start, timeout }) = self.in_flight.front()
        {
            match done.try_is_complete() {
                Ok(true) => drop(self.in_flight.pop_front()),
                Ok(false) if start.elapsed() < *timeout => return true,
                Ok(false) => {
                    let call = &transfer.call;
                    (self.end)(&format!("{call} has not ended {timeout:?} after its start"));
                }
                Err(error) => (self.end)(&format!("{error} in {}", transfer.call)),
            }
        }
        false
    }

    /// Exchanges bytes with some slots and waits for the communicator's stream, but not for the
    /// computing stream.
    fn exchange(
        &mut self,
        bytes: &[u8],
        slots: &[usize],
    ) -> std::result::Result<Vec<Vec<u8>>, String> {
        let stream = self.comm.stream();
        let own = stream.clone_htod(bytes).map_err(|error| error.to_string())?;
        let buffer = stream.alloc_zeros::<u8>(bytes.len() * slots.len());
        let mut all = buffer.map_err(|error| error.to_string())?;
        let sends = slots.iter().map(|&slot| (slot, own.as_view()));
        let mut start = 0;
        let incoming: Vec<_> = slots
            .iter()
            .map(|&slot| {
                let place = start..start + bytes.len();
                start = place.end;
                (slot, place)
            })
            .collect();
        send_and_receive(&self.comm, sends.collect(), all.as_view_mut(), &incoming)?;
        let done = stream.record_event(None).map_err(|error| error.to_string())?;
        let start = Instant::now();
        while !done.try_is_complete().map_err(|error| error.to_string())? {
            // The exchange may wait behind an earlier transfer, so check the transfers for
            // failures.
            self.poll_transfers();
            waiting::pause(waiting::sleep_duration(start.elapsed()));
        }
        let all = stream.clone_dtoh(&all).map_err(|error| error.to_string())?;
        Ok(incoming.into_iter().map(|(_, place)| all[place].to_vec()).collect())
    }

    /// Starts a transfer; returns the event at its end.
    fn start(
        &mut self,
        transfer: LinkTransfer,
        timeout: Duration,
    ) -> std::result::Result<Arc<CudaEvent>, String> {
        let stream = self.comm.stream();
        if let Some(ready) = &transfer.ready {
            stream.wait(ready).map_err(|error| error.to_string())?;
        }
        start_messages(&self.comm, &transfer).map_err(|error| error.to_string())?;
        let done = Arc::new(stream.record_event(None).map_err(|error| error.to_string())?);
        let start = Instant::now();
        self.in_flight.push_back(PendingTransfer {
            transfer,
            done: Arc::clone(&done),
            start,
            timeout,
        });
        Ok(done)
    }
}

/// Returns true if items of this dtype can be sent and computed with. NCCL could send `I32`, but
/// candle's CUDA kernels for it cannot add, compare or copy.
pub(super) fn is_supported(dtype: DType) -> bool {
    use DType::{BF16, F16, F32, F64, I64, U8, U32};
    matches!(dtype, U8 | U32 | I64 | BF16 | F16 | F32 | F64)
}

/// Joins the communicator with this id, on a new stream of the device.
fn open_comm(
    computing: &CudaStream,
    place: Placement,
    id: CommId,
) -> std::result::Result<Comm, String> {
    // NCCL uses the current device of its thread.
    let context = computing.context();
    context.bind_to_thread().map_err(|error| error.to_string())?;
    let stream = context.new_stream().map_err(|error| error.to_string())?;
    let id = NcclId::uninit(id.map(|item| c_char::from_ne_bytes(item.to_ne_bytes())));
    let rank = place.rank().as_usize();
    let world_size = place.world_size().as_usize();
    Comm::from_rank(stream, rank, world_size, id).map_err(|error| error_name(&error))
}

/// Starts the sends and receives of a transfer on the communicator's stream.
fn start_messages(comm: &Comm, transfer: &LinkTransfer) -> Result<()> {
    match transfer.source.dtype() {
        DType::U8 => start_typed::<u8>(comm, transfer),
        DType::U32 => start_typed::<u32>(comm, transfer),
        DType::I64 => start_typed::<i64>(comm, transfer),
        DType::BF16 => start_typed::<bf16>(comm, transfer),
        DType::F16 => start_typed::<f16>(comm, transfer),
        DType::F32 => start_typed::<f32>(comm, transfer),
        DType::F64 => start_typed::<f64>(comm, transfer),
        other => bail!("tensors of type {} cannot be sent over NCCL", other.as_str()),
    }
}

fn start_typed<T>(comm: &Comm, transfer: &LinkTransfer) -> Result<()>
where
    T: CudaDType + NcclType + DeviceRepr,
{
    let LinkTransfer { source, outgoing, destination, incoming, .. } = transfer;
    let (storage, layout) = source.storage_and_layout();
    let source = items::<T>(&storage, layout)?;
    if incoming.is_empty() {
        let sends = outgoing.iter().map(|(to, part)| (*to, source.slice(part.clone())));
        return group(comm, sends.collect(), Vec::new()).map_err(candle_core::Error::msg);
    }
    destination.inplace_op1(&ReceiveOp { comm, source, outgoing, incoming })
}

/// A transfer as candle's operation on the destination, so that candle locks the destination while
/// the transfer starts.
struct ReceiveOp<'a, T> {
    comm: &'a Comm,
    source: CudaView<'a, T>,
    outgoing: &'a [(usize, Range<usize>)],
    incoming: &'a [(usize, Range<usize>)],
}

impl<T: CudaDType + NcclType + DeviceRepr> InplaceOp1 for ReceiveOp<'_, T> {
    fn name(&self) -> &'static str {
        "a transfer over NCCL"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("a tensor is not on a CUDA device")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("a tensor is not contiguous")
        };
        let whole = storage.as_cuda_slice_mut::<T>()?;
        let Some(place) = whole.try_slice_mut(start..end) else {
            bail!("a tensor ends after the end of its storage")
        };
        let sends = self.outgoing.iter().map(|(to, part)| (*to, self.source.slice(part.clone())));
        send_and_receive(self.comm, sends.collect(), place, self.incoming)
            .map_err(candle_core::Error::msg)
    }
}

/// Starts the sends, and the receives into the ranges `incoming` of `place`, which are in order.
fn send_and_receive<T: NcclType + DeviceRepr>(
    comm: &Comm,
    sends: Sends<'_, T>,
    place: CudaViewMut<'_, T>,
    incoming: &[(usize, Range<usize>)],
) -> std::result::Result<(), String> {
    receive_into(comm, sends, place, 0, incoming, Vec::new())
}

type Sends<'a, T> = Vec<(usize, CudaView<'a, T>)>;
type Receives<'a, T> = Vec<(usize, CudaViewMut<'a, T>)>;

/// Splits the range of each sender off `rest`, which begins at item `start`, and then starts all
/// sends and receives. This function is recursive, because each range borrows from the rest.
fn receive_into<T: NcclType + DeviceRepr>(
    comm: &Comm,
    sends: Sends<'_, T>,
    mut rest: CudaViewMut<'_, T>,
    start: usize,
    incoming: &[(usize, Range<usize>)],
    receives: Receives<'_, T>,
) -> std::result::Result<(), String> {
    let [(from, part), more @ ..] = incoming else { return group(comm, sends, receives) };
    let too_small = "the destination is too small for the received items";
    let (mut with_gap, rest) = rest.try_split_at_mut(part.end - start).ok_or(too_small)?;
    let (_, place) = with_gap.try_split_at_mut(part.start - start).ok_or(too_small)?;
    // Shorten the lifetime of the earlier ranges to that of this call's range.
    let mut receives: Receives<'_, T> = receives;
    receives.push((*from, place));
    receive_into(comm, sends, rest, part.end, more, receives)
}

/// Starts all sends and receives as one group of NCCL. If they were started one after another, two
/// processes could each wait for the other's receive.
fn group<T: NcclType + DeviceRepr>(
    comm: &Comm,
    sends: Sends<'_, T>,
    receives: Receives<'_, T>,
) -> std::result::Result<(), String> {
    let mut group = comm.group();
    for (to, items) in sends {
        group.send(items, rank_of(to)).map_err(|error| error_name(&error))?;
    }
    for (from, place) in receives {
        group.recv(place, rank_of(from)).map_err(|error| error_name(&error))?;
    }
    Ok(())
}

/// Returns the items of a contiguous tensor.
fn items<'a, T: CudaDType>(storage: &'a Storage, layout: &Layout) -> Result<CudaView<'a, T>> {
    let Storage::Cuda(storage) = storage else { bail!("a tensor is not on a CUDA device") };
    let start = layout.start_offset();
    let items = storage.as_cuda_slice::<T>()?.try_slice(start..start + layout.shape().elem_count());
    items
        .filter(|_| layout.is_contiguous())
        .ok_or_else(|| candle_core::Error::msg("a tensor is not contiguous"))
}

/// Converts a rank to NCCL's type.
#[expect(clippy::expect_used, reason = "a mesh has fewer than 2^31 slots")]
fn rank_of(rank: usize) -> i32 {
    i32::try_from(rank).expect("ranks are below the number of slots")
}

/// Returns the name of NCCL's error, which cudarc's message does not contain.
fn error_name(error: &NcclError) -> String {
    format!("{:?}", error.0)
}
