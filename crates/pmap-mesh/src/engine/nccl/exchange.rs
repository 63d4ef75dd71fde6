//! The two steps of every collective: an exchange of headers, then an exchange of items.

use std::{
    ops::Range,
    process,
    sync::{Arc, OnceLock},
    time::Duration,
};

use candle_core::{DType, Device, Result, Tensor, bail, cuda_backend::cudarc::driver::CudaEvent};

use super::link::{LinkTransfer, TransferError, TransferHandle, Transport};
use crate::{
    engine::{
        GroupContext,
        processes::{self, disagreement},
    },
    error::{CollectiveError, one_line},
    sync::catch,
};

/// The alignment, in items, of the items received from each rank. For every dtype it is at least 16
/// bytes, the unit in which NCCL and kernels move memory.
const ALIGNMENT: usize = 16;

/// Ends this process after a failure; the launcher ends the others.
#[derive(Clone, Debug)]
pub(super) struct ExitHandler {
    pub(super) slot: usize,
}

impl ExitHandler {
    /// Prints the reason and ends this process.
    pub(super) fn end(&self, reason: &str) -> ! {
        processes::exit_process(self.slot, reason, || process::exit(1))
    }
}

/// A channel for collectives, which run one at a time. A replica has one channel for collectives that
/// it waits for at once, and one for started collectives.
#[derive(Debug)]
pub(super) struct NcclChannel {
    pub(super) link: Box<dyn Transport>,
    /// Time limit for the headers of the other members.
    pub(super) header_timeout: Duration,
    /// Time limit for a transfer, including the computation of its tensors.
    pub(super) deadline: Duration,
    pub(super) exit: ExitHandler,
    /// The reason why a collective failed in this process after its headers had agreed, if any did.
    pub(super) broken: OnceLock<String>,
}

/// A running collective of this slot.
pub(super) struct NcclCall<'a> {
    pub(super) channel: &'a NcclChannel,
    pub(super) ctx: &'a GroupContext,
}

impl NcclCall<'_> {
    /// Exchanges the hash of the call and `header_value` with all members: the size of this member's
    /// tensor in the free dimension, or the rank from which this member receives. Returns the
    /// `header_value` of each member, by rank.
    ///
    /// # Errors
    ///
    /// On all members, if the hashes differ. The error quotes the description of rank 0 and of the
    /// first rank with a different hash; `text` returns this member's description, which is as long
    /// as the others'. On this member, if an earlier collective [failed](Self::carry_out) in this
    /// process.
    pub(super) fn exchange_headers(
        &self,
        call_hash: u64,
        header_value: i64,
        text: impl FnOnce() -> Vec<u8>,
    ) -> Result<Vec<i64>> {
        if let Some(reason) = self.channel.broken.get() {
            bail!(
                "{reason}, so no later collective can run: other processes still wait for its data"
            );
        }
        let own = [call_hash.to_le_bytes(), header_value.to_le_bytes()].concat();
        let headers = self.exchange_messages(own);
        let first = header_word(&headers[0], 0);
        match headers.iter().position(|header| header_word(header, 0) != first) {
            None => Ok(headers
                .iter()
                .map(|header| i64::from_le_bytes(header_word(header, 1)))
                .collect()),
            Some(other) => {
                let texts = self.exchange_messages(text());
                Err(disagreement(self.ctx, other, |rank| texts[rank].clone()))
            }
        }
    }

    /// Runs the steps of a collective after its headers have agreed.
    ///
    /// If a step fails here, the other members wait for data that never arrive, and would take the
    /// next message of this process for these data. So this process sends nothing more, even if its
    /// replica ignores the error.
    pub(super) fn carry_out<T>(&self, steps: impl FnOnce() -> Result<T>) -> Result<T> {
        let outcome = catch(steps).unwrap_or_else(|panic| Err(candle_core::Error::msg(panic)));
        if let Err(error) = &outcome {
            let reason =
                format!("{} has failed in this process: {}", self.ctx.call, one_line(error));
            // `set` keeps the first failure: the other members wait for its data.
            drop(self.channel.broken.set(reason));
        }
        outcome
    }

    /// Exchanges messages of equal length with all members. Returns the messages of all members, by
    /// rank.
    fn exchange_messages(&self, own: Vec<u8>) -> Vec<Vec<u8>> {
        let mut others = self.ctx.members().to_vec();
        others.remove(self.ctx.rank);
        let limit = self.channel.header_timeout;
        let arrived = self.channel.link.exchange(own.clone(), &others, limit);
        let mut all = arrived.unwrap_or_else(|error| self.end(error, limit));
        all.insert(self.ctx.rank, own);
        all
    }

    /// Sends items `part(n)` of the flat tensor `source` to each rank n. Returns the items that
    /// each rank has for this rank, by rank: `n_items(n)` items from another rank n, and the part
    /// of this rank itself.
    pub(super) fn exchange_items(
        &self,
        source: Tensor,
        part: impl Fn(usize) -> Range<usize>,
        n_items: impl Fn(usize) -> usize,
    ) -> Result<Vec<Tensor>> {
        let mut exchange = ItemExchange::new(self.ctx, source, part, n_items)?;
        exchange.start(self);
        exchange.results()
    }

    /// Ends the program after an operation with a time limit, because started messages cannot be
    /// cancelled.
    fn end(&self, error: TransferError, limit: Duration) -> ! {
        let call = &self.ctx.call;
        match error {
            TransferError::Failed(reason) => self.channel.exit.end(&format!("{reason} in {call}")),
            TransferError::Late => {
                self.channel.exit.end(&deadline_error(self.ctx, limit).to_string())
            }
        }
    }
}

/// Returns the error for a wait that missed the deadline. Over NCCL the missing ranks are unknown.
pub(super) fn deadline_error(ctx: &GroupContext, limit: Duration) -> CollectiveError {
    CollectiveError::Deadline {
        slot: ctx.slot(),
        missing: Vec::new(),
        call: ctx.call.to_string(),
        limit,
    }
}

/// Returns word number `n` of a header.
#[expect(clippy::expect_used, reason = "all headers have two words")]
fn header_word(header: &[u8], n: usize) -> [u8; 8] {
    header.as_chunks().0.get(n).copied().expect("a header has two words")
}

/// The items that a rank sends to and receives from each rank of its group.
#[derive(Debug)]
pub(super) struct ItemExchange {
    own_rank: usize,
    source: Tensor,
    /// The items of the source for each rank, including this one.
    outgoing: Vec<Range<usize>>,
    /// The tensor for received items. It is allocated in `new`, so that the device allocates it
    /// before later computations.
    destination: Tensor,
    /// The items of the destination from each rank; empty for this rank.
    incoming: Vec<Range<usize>>,
    /// An event after the computation of both tensors.
    ready: Option<Arc<CudaEvent>>,
    transfer: Option<Box<dyn TransferHandle>>,
}

impl ItemExchange {
    /// Prepares to send items `part(n)` of the flat tensor `source` to rank n, and to receive
    /// `n_items(n)` items from it.
    pub(super) fn new(
        ctx: &GroupContext,
        source: Tensor,
        part: impl Fn(usize) -> Range<usize>,
        n_items: impl Fn(usize) -> usize,
    ) -> Result<Self> {
        let mut end = 0;
        let mut incoming = Vec::with_capacity(ctx.size());
        for rank in 0..ctx.size() {
            let n_items = if rank == ctx.rank { 0 } else { n_items(rank) };
            incoming.push(end..end + n_items);
            end += n_items.next_multiple_of(ALIGNMENT);
        }
        let destination = Tensor::zeros(end.max(1), source.dtype(), source.device())?;
        Ok(Self {
            own_rank: ctx.rank,
            outgoing: (0..ctx.size()).map(part).collect(),
            ready: record_event(source.device())?,
            source,
            destination,
            incoming,
            transfer: None,
        })
    }

    /// Starts the transfer, after the headers of all members have agreed.
    pub(super) fn start(&mut self, call: &NcclCall<'_>) {
        let members = call.ctx.members();
        let transfer = LinkTransfer {
            call: Arc::clone(&call.ctx.call),
            ready: self.ready.clone(),
            source: self.source.clone(),
            outgoing: self.remote_parts(members, &self.outgoing),
            destination: self.destination.clone(),
            incoming: self.remote_parts(members, &self.incoming),
        };
        if transfer.outgoing.is_empty() && transfer.incoming.is_empty() {
            return;
        }
        let limit = call.channel.deadline;
        let started = call.channel.link.transfer(transfer, limit);
        self.transfer = Some(started.unwrap_or_else(|error| call.end(error, limit)));
    }

    /// Returns the non-empty parts of the other ranks, each with its slot.
    fn remote_parts(
        &self,
        members: &[usize],
        parts: &[Range<usize>],
    ) -> Vec<(usize, Range<usize>)> {
        let mut remote = Vec::new();
        for (rank, part) in parts.iter().enumerate() {
            if rank != self.own_rank && !part.is_empty() {
                remote.push((members[rank], part.clone()));
            }
        }
        remote
    }

    /// Returns the items that each rank has for this rank, by rank. Called after `start`. Later
    /// work of the device waits until the items have arrived.
    pub(super) fn results(&self) -> Result<Vec<Tensor>> {
        if let Some(transfer) = &self.transfer {
            transfer.make_device_wait()?;
        }
        let mut arrived = Vec::with_capacity(self.incoming.len());
        for (rank, incoming) in self.incoming.iter().enumerate() {
            let (x, items) = if rank == self.own_rank {
                (&self.source, &self.outgoing[rank])
            } else {
                (&self.destination, incoming)
            };
            arrived.push(x.narrow(0, items.start, items.len())?);
        }
        Ok(arrived)
    }
}

/// Records an event after the device's pending work.
fn record_event(device: &Device) -> Result<Option<Arc<CudaEvent>>> {
    let Device::Cuda(cuda) = device else { return Ok(None) };
    let event = cuda.cuda_stream().record_event(None).map_err(candle_core::Error::wrap)?;
    Ok(Some(Arc::new(event)))
}

/// Returns a tensor without items: a view, since CUDA cannot allocate 0 bytes.
pub(super) fn empty_tensor(dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::zeros(1, dtype, device)?.narrow(0, 0, 0)
}
