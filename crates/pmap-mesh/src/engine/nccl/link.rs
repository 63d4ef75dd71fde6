//! The thread that holds a communicator, which must stay where it was made, and its stream.
//!
//! The stream is not the one on which the device computes: it waits for what makes a transfer's
//! tensors ([`Transfer::ready`]), and what the device computes with them waits for the transfer
//! ([`Moving::order`]). cudarc keeps events for every tensor itself, but they do not do. candle's
//! copies into a part of a tensor, which put tensors together, note that they have read it, not
//! that they have written it; and of those that have read a tensor only the last is known, so that
//! computing with it while it is being sent makes the sending forgotten. So there are events of our
//! own, and what is sent is held until it has been.
//!
//! cudarc 0.19 shows nobody the handle of a communicator, and has no safe call that asks for errors
//! of transfers under way (`ncclCommGetAsyncError`). So the holder looks at the events of all
//! transfers, and ends the process if one of them fails or takes too long.

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

use super::store::Id;
use crate::{engine::processes::waiting, error::call::CollectiveCall, sync::catch};

/// How long a communicator is kept when its mesh is gone: what this process has sent last may still
/// be on its way, and cudarc ends communicators without waiting for it. The last that is sent are
/// headers of some bytes, which arrive within milliseconds.
const LINGER: Duration = Duration::from_millis(200);

/// How often the holder looks whether transfers have ended while it has nothing else to do.
const LOOK: Duration = Duration::from_millis(1);

/// What one process sends and receives at once, all of one type, in tensors of one dimension on the
/// device of this process, each in one piece.
pub(super) struct Transfer {
    /// The collective of which it is a part.
    pub(super) call: Arc<CollectiveCall>,
    /// What the device has done when its tensors are ready; none on a processor, which does at once
    /// what it is told.
    pub(super) ready: Option<Arc<CudaEvent>>,
    /// What is sent. One tensor: a thread that locks a storage a second time could wait for a
    /// `Var::set` that waits for the first.
    pub(super) source: Tensor,
    /// To whom, and which of its items: not none.
    pub(super) outgoing: Vec<(usize, Range<usize>)>,
    /// Where what is received goes; nobody else looks at it.
    pub(super) destination: Tensor,
    /// From whom, and to which of its items: not none, one after the other.
    pub(super) incoming: Vec<(usize, Range<usize>)>,
}

/// Why something has not come to its end.
#[derive(Debug)]
pub(super) enum Broken {
    Late,
    Failed(String),
}

type Outcome<T> = std::result::Result<T, Broken>;

/// What carries messages and transfers between processes, for one of them.
pub(super) trait Transport: fmt::Debug + Send + Sync {
    /// Hands bytes to each of these slots, and returns as many of each of them when all have
    /// arrived. Does not wait for the device.
    fn exchange(&self, bytes: Vec<u8>, slots: &[usize], within: Duration) -> Outcome<Vec<Vec<u8>>>;

    /// Starts a transfer, which begins when its tensors are ready.
    fn transfer(&self, transfer: Transfer, within: Duration) -> Outcome<Box<dyn Moving>>;
}

/// A transfer that has been started. Until [`order`](Self::order), its source must not be written to
/// and its destination not be read.
pub(super) trait Moving: fmt::Debug + Send {
    /// Lets everything that the device begins from now on come after the transfer.
    fn order(&self) -> Result<()>;
}

/// What the holder is asked to do, and where its answer is waited for.
enum Job {
    Exchange { bytes: Vec<u8>, slots: Vec<usize>, reply: Reply<Vec<Vec<u8>>> },
    Transfer { transfer: Transfer, within: Duration, reply: Reply<Arc<CudaEvent>> },
}

type Reply<T> = mpsc::SyncSender<std::result::Result<T, String>>;

/// This process's communicator with all others; a thread that waits for it can stop waiting.
#[derive(Debug)]
pub(super) struct Link {
    /// On which the device computes.
    stream: Arc<CudaStream>,
    jobs: Option<mpsc::Sender<Job>>,
    holder: Option<JoinHandle<()>>,
}

/// The id of a new communicator.
pub(super) fn new_id() -> std::result::Result<Id, String> {
    let id = catch(NcclId::new)?.map_err(|error| text(&error))?;
    Ok(id.internal().map(|item| u8::from_ne_bytes(item.to_ne_bytes())))
}

impl Link {
    /// Joins the others, each of which calls this with the same id. `end` ends the process.
    pub(super) fn join(
        device: &CudaDevice,
        place: Placement,
        id: Id,
        within: Duration,
        end: impl Fn(&str) + Send + 'static,
    ) -> std::result::Result<Self, String> {
        let (started, start) = mpsc::sync_channel(1);
        let (jobs, queue) = mpsc::channel::<Job>();
        let stream = device.cuda_stream();
        let computing = Arc::clone(&stream);
        let hold = move || {
            let comm = match catch(|| open(&computing, place, id)).flatten() {
                Ok(comm) => comm,
                Err(error) => return drop(started.send(Err(error))),
            };
            drop(started.send(Ok(())));
            let mut holder = Holder { comm, underway: VecDeque::new(), end };
            holder.serve(&queue);
            thread::sleep(if place.world_size().as_u64() > 1 { LINGER } else { Duration::ZERO });
            drop(catch(|| drop(holder)));
        };
        let holder = thread::Builder::new()
            .name("nccl".into())
            .spawn(hold)
            .map_err(|error| error.to_string())?;
        match start.recv_timeout(within) {
            Ok(joined) => joined.map(|()| Self { stream, jobs: Some(jobs), holder: Some(holder) }),
            Err(RecvTimeoutError::Timeout) => Err(format!("not all have joined within {within:?}")),
            Err(RecvTimeoutError::Disconnected) => Err(ENDED.into()),
        }
    }

    /// Has the holder do something, and waits for its answer.
    fn ask<T>(&self, within: Duration, job: impl FnOnce(Reply<T>) -> Job) -> Outcome<T> {
        let (reply, answer) = mpsc::sync_channel(1);
        let is_sent = match &self.jobs {
            Some(jobs) => jobs.send(job(reply)).is_ok(),
            None => false,
        };
        if !is_sent {
            return Err(Broken::Failed(ENDED.into()));
        }
        match answer.recv_timeout(within) {
            Ok(answer) => answer.map_err(Broken::Failed),
            Err(RecvTimeoutError::Timeout) => Err(Broken::Late),
            Err(RecvTimeoutError::Disconnected) => Err(Broken::Failed(ENDED.into())),
        }
    }
}

impl Transport for Link {
    fn exchange(&self, bytes: Vec<u8>, slots: &[usize], within: Duration) -> Outcome<Vec<Vec<u8>>> {
        self.ask(within, |reply| Job::Exchange { bytes, slots: slots.to_vec(), reply })
    }

    fn transfer(&self, transfer: Transfer, within: Duration) -> Outcome<Box<dyn Moving>> {
        let done = self.ask(within, |reply| Job::Transfer { transfer, within, reply })?;
        Ok(Box::new(Event { stream: Arc::clone(&self.stream), done }))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(holder) = self.holder.take() {
            drop(holder.join());
        }
    }
}

const ENDED: &str = "the thread of the communicator has ended";

/// The end of a transfer.
#[derive(Debug)]
struct Event {
    /// On which the device computes.
    stream: Arc<CudaStream>,
    done: Arc<CudaEvent>,
}

impl Moving for Event {
    fn order(&self) -> Result<()> {
        self.stream.wait(&self.done).map_err(candle_core::Error::wrap)
    }
}

/// The thread's own.
struct Holder<E> {
    comm: Comm,
    /// Transfers that have been started and have not ended, in their order on the stream.
    underway: VecDeque<PendingTransfer>,
    end: E,
}

struct PendingTransfer {
    /// Held until it is over: freed earlier, its memory could be given to others.
    transfer: Transfer,
    done: Arc<CudaEvent>,
    start: Instant,
    within: Duration,
}

impl<E: Fn(&str)> Holder<E> {
    /// Does what it is asked for until nobody can ask any more, and what is under way has ended.
    fn serve(&mut self, queue: &mpsc::Receiver<Job>) {
        while let Some(job) = self.next(queue) {
            match job {
                // One that has stopped waiting needs no reply.
                Job::Exchange { bytes, slots, reply } => {
                    drop(reply.send(catch(|| self.exchange(&bytes, &slots)).flatten()));
                }
                Job::Transfer { transfer, within, reply } => {
                    drop(reply.send(catch(|| self.start(transfer, within)).flatten()));
                }
            }
        }
        while self.is_busy() {
            thread::sleep(LOOK);
        }
    }

    fn next(&mut self, queue: &mpsc::Receiver<Job>) -> Option<Job> {
        while self.is_busy() {
            match queue.recv_timeout(LOOK) {
                Ok(job) => return Some(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        queue.recv().ok()
    }

    /// Forgets what has ended, and returns whether there is more; ends the process if something has
    /// failed.
    fn is_busy(&mut self) -> bool {
        while let Some(PendingTransfer { transfer, done, start, within }) = self.underway.front() {
            match done.try_is_complete() {
                Ok(true) => drop(self.underway.pop_front()),
                Ok(false) if start.elapsed() < *within => return true,
                Ok(false) => {
                    let call = &transfer.call;
                    (self.end)(&format!("{call} has not ended {within:?} after its start"));
                }
                Err(error) => (self.end)(&format!("{error} in {}", transfer.call)),
            }
        }
        false
    }

    /// Hands bytes to some slots, on the communicator's stream alone.
    fn exchange(
        &mut self,
        bytes: &[u8],
        slots: &[usize],
    ) -> std::result::Result<Vec<Vec<u8>>, String> {
        let stream = self.comm.stream();
        let own = stream.clone_htod(bytes).map_err(|error| error.to_string())?;
        let room = stream.alloc_zeros::<u8>(bytes.len() * slots.len());
        let mut all = room.map_err(|error| error.to_string())?;
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
            // What was started before may be what it waits for.
            self.is_busy();
            waiting::pause(waiting::sleep_duration(start.elapsed()));
        }
        let all = stream.clone_dtoh(&all).map_err(|error| error.to_string())?;
        Ok(incoming.into_iter().map(|(_, place)| all[place].to_vec()).collect())
    }

    /// Starts a transfer; returns the event of its end.
    fn start(
        &mut self,
        transfer: Transfer,
        within: Duration,
    ) -> std::result::Result<Arc<CudaEvent>, String> {
        let stream = self.comm.stream();
        if let Some(ready) = &transfer.ready {
            stream.wait(ready).map_err(|error| error.to_string())?;
        }
        start(&self.comm, &transfer).map_err(|error| error.to_string())?;
        let done = Arc::new(stream.record_event(None).map_err(|error| error.to_string())?);
        let start = Instant::now();
        self.underway.push_back(PendingTransfer {
            transfer,
            done: Arc::clone(&done),
            start,
            within,
        });
        Ok(done)
    }
}

/// Whether items of this type can be sent, and worked on where they arrive: NCCL would send `I32`, but
/// candle has no kernels for it on CUDA devices that add, compare or copy.
pub(super) fn carries(dtype: DType) -> bool {
    use DType::{BF16, F16, F32, F64, I64, U8, U32};
    matches!(dtype, U8 | U32 | I64 | BF16 | F16 | F32 | F64)
}

fn open(computing: &CudaStream, place: Placement, id: Id) -> std::result::Result<Comm, String> {
    // NCCL takes the device that is current on its thread.
    let context = computing.context();
    context.bind_to_thread().map_err(|error| error.to_string())?;
    let stream = context.new_stream().map_err(|error| error.to_string())?;
    let id = NcclId::uninit(id.map(|item| c_char::from_ne_bytes(item.to_ne_bytes())));
    let rank = place.rank().as_usize();
    let world_size = place.world_size().as_usize();
    Comm::from_rank(stream, rank, world_size, id).map_err(|error| text(&error))
}

fn start(comm: &Comm, transfer: &Transfer) -> Result<()> {
    match transfer.source.dtype() {
        DType::U8 => start_of::<u8>(comm, transfer),
        DType::U32 => start_of::<u32>(comm, transfer),
        DType::I64 => start_of::<i64>(comm, transfer),
        DType::BF16 => start_of::<bf16>(comm, transfer),
        DType::F16 => start_of::<f16>(comm, transfer),
        DType::F32 => start_of::<f32>(comm, transfer),
        DType::F64 => start_of::<f64>(comm, transfer),
        other => bail!("tensors of type {} cannot be sent over NCCL", other.as_str()),
    }
}

fn start_of<T>(comm: &Comm, transfer: &Transfer) -> Result<()>
where
    T: CudaDType + NcclType + DeviceRepr,
{
    let Transfer { source, outgoing, destination, incoming, .. } = transfer;
    let (storage, layout) = source.storage_and_layout();
    let source = items::<T>(&storage, layout)?;
    if incoming.is_empty() {
        let sends = outgoing.iter().map(|(to, part)| (*to, source.slice(part.clone())));
        return group(comm, sends.collect(), Vec::new()).map_err(candle_core::Error::msg);
    }
    destination.inplace_op1(&Receive { comm, source, outgoing, incoming })
}

/// The transfer as an operation on its destination, which candle lends to nobody else meanwhile.
struct Receive<'a, T> {
    comm: &'a Comm,
    source: CudaView<'a, T>,
    outgoing: &'a [(usize, Range<usize>)],
    incoming: &'a [(usize, Range<usize>)],
}

impl<T: CudaDType + NcclType + DeviceRepr> InplaceOp1 for Receive<'_, T> {
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
            bail!("a tensor ends behind its storage")
        };
        let sends = self.outgoing.iter().map(|(to, part)| (*to, self.source.slice(part.clone())));
        send_and_receive(self.comm, sends.collect(), place, self.incoming)
            .map_err(candle_core::Error::msg)
    }
}

/// Sends what is to be sent, and receives into parts of `place` that follow each other.
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

/// Cuts the part of each sender off `rest`, which begins with item number `start`; a call for each,
/// since a part borrows the rest that it is cut from.
fn receive_into<T: NcclType + DeviceRepr>(
    comm: &Comm,
    sends: Sends<'_, T>,
    mut rest: CudaViewMut<'_, T>,
    start: usize,
    incoming: &[(usize, Range<usize>)],
    receives: Receives<'_, T>,
) -> std::result::Result<(), String> {
    let [(from, part), more @ ..] = incoming else { return group(comm, sends, receives) };
    let too_small = "what is received has no place";
    let (mut with_gap, rest) = rest.try_split_at_mut(part.end - start).ok_or(too_small)?;
    let (_, place) = with_gap.try_split_at_mut(part.start - start).ok_or(too_small)?;
    // Of the shorter life of this call's part.
    let mut receives: Receives<'_, T> = receives;
    receives.push((*from, place));
    receive_into(comm, sends, rest, part.end, more, receives)
}

/// Starts all sends and receives at once; in any order one after the other, two processes could each
/// wait for the other's receive.
fn group<T: NcclType + DeviceRepr>(
    comm: &Comm,
    sends: Sends<'_, T>,
    receives: Receives<'_, T>,
) -> std::result::Result<(), String> {
    let mut group = comm.group();
    for (to, items) in sends {
        group.send(items, rank_of(to)).map_err(|error| text(&error))?;
    }
    for (from, place) in receives {
        group.recv(place, rank_of(from)).map_err(|error| text(&error))?;
    }
    Ok(())
}

/// The items of a contiguous tensor.
fn items<'a, T: CudaDType>(storage: &'a Storage, layout: &Layout) -> Result<CudaView<'a, T>> {
    let Storage::Cuda(storage) = storage else { bail!("a tensor is not on a CUDA device") };
    let start = layout.start_offset();
    let items = storage.as_cuda_slice::<T>()?.try_slice(start..start + layout.shape().elem_count());
    items
        .filter(|_| layout.is_contiguous())
        .ok_or_else(|| candle_core::Error::msg("a tensor is not contiguous"))
}

/// A rank as NCCL counts it.
#[expect(clippy::expect_used, reason = "a mesh has fewer slots than 32 bits count")]
fn rank_of(rank: usize) -> i32 {
    i32::try_from(rank).expect("ranks are below the number of slots")
}

/// cudarc's own text does not name the error.
fn text(error: &NcclError) -> String {
    format!("{:?}", error.0)
}
