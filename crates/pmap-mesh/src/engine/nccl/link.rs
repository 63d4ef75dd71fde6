//! The thread that holds a communicator, which must stay where it was made.

use std::{
    ffi::c_char,
    fmt,
    ops::Range,
    sync::mpsc::{self, RecvTimeoutError},
    thread::{self, JoinHandle},
    time::Duration,
};

use candle_core::{
    CudaDevice, CudaStorage, DType, Layout, Result, Storage, Tensor, bail,
    cuda_backend::{
        CudaDType,
        cudarc::{
            driver::{CudaView, CudaViewMut, DeviceRepr, ValidAsZeroBits},
            nccl::{Comm, Id as NcclId, NcclType, result::NcclError},
        },
    },
    op::BackpropOp,
};
use core_types::Placement;
use half::{bf16, f16};

use super::store::Id;
use crate::mesh::workers;

/// How long a communicator is kept when its mesh is gone: what this process has sent last may still
/// be on its way, and cudarc ends communicators without waiting for it. The last that is sent are
/// headers of some bytes, which arrive within milliseconds.
const LINGER: Duration = Duration::from_millis(200);

/// What one process sends and receives at once, all of one type.
pub(super) struct Transfer {
    /// What is sent, in one dimension, contiguous, on the device of this process. One tensor: a
    /// thread that locks a storage a second time could wait for a `Var::set` that waits for the
    /// first.
    pub(super) source: Tensor,
    /// To whom, and which of its items: not none.
    pub(super) outgoing: Vec<(usize, Range<usize>)>,
    /// From whom, and how many items: not none.
    pub(super) incoming: Vec<(usize, usize)>,
}

/// Why a transfer has not come to its end.
pub(super) enum Broken {
    Late,
    Failed(String),
}

/// What carries transfers between processes, for one of them.
pub(super) trait Carrier: fmt::Debug + Send + Sync {
    /// What arrives, in the order in which it was asked for.
    fn transfer(
        &self,
        transfer: Transfer,
        within: Duration,
    ) -> std::result::Result<Vec<Tensor>, Broken>;
}

/// A transfer to be made, and where its results are waited for.
struct Job {
    transfer: Transfer,
    reply: mpsc::SyncSender<std::result::Result<Vec<Tensor>, String>>,
}

/// This process's communicator with all others; a thread that waits for it can stop waiting.
#[derive(Debug)]
pub(super) struct Link {
    jobs: Option<mpsc::Sender<Job>>,
    holder: Option<JoinHandle<()>>,
}

/// The id of a new communicator.
pub(super) fn new_id() -> std::result::Result<Id, String> {
    let id = workers::catch(NcclId::new)?.map_err(|error| text(&error))?;
    Ok(id.internal().map(|item| u8::from_ne_bytes(item.to_ne_bytes())))
}

impl Link {
    /// Joins the others, each of which calls this with the same id.
    pub(super) fn join(
        device: CudaDevice,
        place: Placement,
        id: Id,
        within: Duration,
    ) -> std::result::Result<Self, String> {
        let (started, start) = mpsc::sync_channel(1);
        let (jobs, queue) = mpsc::channel::<Job>();
        let hold = move || {
            let comm = match workers::catch(|| open(&device, place, id)).flatten() {
                Ok(comm) => comm,
                Err(error) => return drop(started.send(Err(error))),
            };
            drop(started.send(Ok(())));
            serve(&comm, &device, queue);
            thread::sleep(if place.world_size().as_u64() > 1 { LINGER } else { Duration::ZERO });
            drop(workers::catch(|| drop(comm)));
        };
        let holder = thread::Builder::new()
            .name("nccl".into())
            .spawn(hold)
            .map_err(|error| error.to_string())?;
        match start.recv_timeout(within) {
            Ok(joined) => joined.map(|()| Self { jobs: Some(jobs), holder: Some(holder) }),
            Err(RecvTimeoutError::Timeout) => Err(format!("not all have joined within {within:?}")),
            Err(RecvTimeoutError::Disconnected) => Err(ENDED.into()),
        }
    }
}

impl Carrier for Link {
    fn transfer(
        &self,
        transfer: Transfer,
        within: Duration,
    ) -> std::result::Result<Vec<Tensor>, Broken> {
        let (reply, arrival) = mpsc::sync_channel(1);
        let is_sent = match &self.jobs {
            Some(jobs) => jobs.send(Job { transfer, reply }).is_ok(),
            None => false,
        };
        if !is_sent {
            return Err(Broken::Failed(ENDED.into()));
        }
        match arrival.recv_timeout(within) {
            Ok(made) => made.map_err(Broken::Failed),
            Err(RecvTimeoutError::Timeout) => Err(Broken::Late),
            Err(RecvTimeoutError::Disconnected) => Err(Broken::Failed(ENDED.into())),
        }
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

/// Makes transfers until nobody can ask for more.
fn serve(comm: &Comm, device: &CudaDevice, queue: mpsc::Receiver<Job>) {
    for Job { transfer, reply } in queue {
        let made =
            workers::catch(|| make(comm, device, &transfer).map_err(|error| error.to_string()));
        // One that has stopped waiting needs no reply.
        drop(reply.send(made.flatten()));
    }
}

/// Whether items of this type can be sent, and worked on where they arrive: NCCL would send `I32`, but
/// candle has no kernels for it on CUDA devices that add, compare or copy.
pub(super) fn carries(dtype: DType) -> bool {
    use DType::{BF16, F16, F32, F64, I64, U8, U32};
    matches!(dtype, U8 | U32 | I64 | BF16 | F16 | F32 | F64)
}

fn open(device: &CudaDevice, place: Placement, id: Id) -> std::result::Result<Comm, String> {
    let stream = device.cuda_stream();
    // NCCL takes the device that is current on its thread.
    stream.context().bind_to_thread().map_err(|error| error.to_string())?;
    let id = NcclId::uninit(id.map(|item| c_char::from_ne_bytes(item.to_ne_bytes())));
    let rank = place.rank().as_usize();
    let world_size = place.world_size().as_usize();
    Comm::from_rank(stream, rank, world_size, id).map_err(|error| text(&error))
}

fn make(comm: &Comm, device: &CudaDevice, transfer: &Transfer) -> Result<Vec<Tensor>> {
    match transfer.source.dtype() {
        DType::U8 => make_of::<u8>(comm, device, transfer),
        DType::U32 => make_of::<u32>(comm, device, transfer),
        DType::I64 => make_of::<i64>(comm, device, transfer),
        DType::BF16 => make_of::<bf16>(comm, device, transfer),
        DType::F16 => make_of::<f16>(comm, device, transfer),
        DType::F32 => make_of::<f32>(comm, device, transfer),
        DType::F64 => make_of::<f64>(comm, device, transfer),
        other => bail!("tensors of type {} cannot be sent over NCCL", other.as_str()),
    }
}

/// Makes a transfer on the stream of the device, after all that is there, and waits for its end.
fn make_of<T>(comm: &Comm, device: &CudaDevice, transfer: &Transfer) -> Result<Vec<Tensor>>
where
    T: CudaDType + NcclType + DeviceRepr + ValidAsZeroBits,
{
    let (storage, layout) = transfer.source.storage_and_layout();
    let source = items::<T>(&storage, layout)?;
    let mut arrived = transfer
        .incoming
        .iter()
        .map(|(_, items)| device.alloc_zeros::<T>(*items))
        .collect::<Result<Vec<_>>>()?;
    let sends = transfer.outgoing.iter().map(|(to, part)| (*to, source.slice(part.clone())));
    let receives: Vec<_> = transfer
        .incoming
        .iter()
        .zip(&mut arrived)
        .map(|((from, _), items)| (*from, items.as_view_mut()))
        .collect();
    start(comm, sends.collect(), receives)
        .map_err(|error| candle_core::Error::msg(text(&error)))?;
    device.cuda_stream().synchronize().map_err(candle_core::Error::wrap)?;
    let tensor = |items| {
        let storage = CudaStorage::wrap_cuda_slice::<T>(items, device.clone());
        let len = storage.as_cuda_slice::<T>()?.len();
        Ok(Tensor::from_storage(Storage::Cuda(storage), len, BackpropOp::none(), false))
    };
    arrived.into_iter().map(tensor).collect()
}

/// Starts all sends and receives at once; in any order one after the other, two processes could each
/// wait for the other's receive.
fn start<T: NcclType + DeviceRepr>(
    comm: &Comm,
    sends: Vec<(usize, CudaView<'_, T>)>,
    receives: Vec<(usize, CudaViewMut<'_, T>)>,
) -> std::result::Result<(), NcclError> {
    let mut group = comm.group();
    for (to, items) in sends {
        group.send(items, rank_of(to))?;
    }
    for (from, place) in receives {
        group.recv(place, rank_of(from))?;
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
