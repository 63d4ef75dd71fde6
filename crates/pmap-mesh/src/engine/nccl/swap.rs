//! The two steps of every collective: the members of a group tell each other what they call, and
//! swap items.

use std::{
    ops::Range,
    process,
    sync::{Arc, OnceLock},
    time::Duration,
};

use candle_core::{DType, Device, Result, Tensor, bail, cuda_backend::cudarc::driver::CudaEvent};

use super::link::{Broken, Moving, Transfer, Transport};
use crate::{
    engine::{
        Site,
        processes::{self, TEXT_BYTES, disagreement},
    },
    error::{CollectiveError, one_line},
    sync::catch,
};

/// What arrives from a rank begins at a multiple of so many items: at 16 bytes in all types, as NCCL
/// and kernels move them.
const ALIGNMENT: usize = 16;

/// How this process ends; the launcher ends the others.
#[derive(Clone, Debug)]
pub(super) struct ExitHandler {
    pub(super) slot: usize,
    /// The MPI program, if the processes are one.
    #[cfg(feature = "mpi")]
    pub(super) session: Option<Arc<crate::engine::mpi::Session>>,
}

impl ExitHandler {
    /// Says why, and ends this process.
    pub(super) fn end(&self, why: &str) -> ! {
        #[cfg(feature = "mpi")]
        if let Some(session) = &self.session {
            session.end(why);
        }
        processes::end(self.slot, why, || process::exit(1))
    }
}

/// What carries collectives, one after the other: those that a replica calls, or those that it starts.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) link: Box<dyn Transport>,
    /// How long to wait for what others call.
    pub(super) patience: Duration,
    /// How long a transfer may take, with the computation that makes what is sent.
    pub(super) deadline: Duration,
    pub(super) ending: ExitHandler,
    /// Why this process has not carried out what all had agreed on, if it has not.
    pub(super) broken: OnceLock<String>,
}

/// A collective while this slot takes part in it.
pub(super) struct Call<'a> {
    pub(super) wire: &'a Wire,
    pub(super) site: &'a Site,
}

impl Call<'_> {
    /// Tells all members what this one calls, as a number, and `aux`; returns theirs, by rank.
    ///
    /// # Errors
    ///
    /// On all members alike, if the numbers differ, in the words of the first that does and of
    /// rank 0; `text` is this one's. On this one, if it has not [carried out](Self::carry_out) what
    /// went before.
    pub(super) fn exchange_headers(
        &self,
        agreement: u64,
        aux: i64,
        text: impl FnOnce() -> Vec<u8>,
    ) -> Result<Vec<i64>> {
        if let Some(why) = self.wire.broken.get() {
            bail!("{why}, and nothing can follow: the others still wait for it");
        }
        let own = [agreement.to_le_bytes(), aux.to_le_bytes()].concat();
        let headers = self.exchange(own);
        let agreements = headers.iter().map(|header| word(header, 0));
        match agreements.clone().position(|other| Some(other) != agreements.clone().next()) {
            None => Ok(headers.iter().map(|header| i64::from_le_bytes(word(header, 1))).collect()),
            Some(other) => {
                let mut text = text();
                text.resize(TEXT_BYTES, 0);
                let texts = self.exchange(text);
                Err(disagreement(self.site, other, |rank| texts[rank].clone()))
            }
        }
    }

    /// Carries out what all have agreed on.
    ///
    /// If it fails here, the others wait for what does not come, and would take what this process
    /// sends next for it. So that is nothing, whether its replica returns the error or not.
    pub(super) fn carry_out<T>(&self, steps: impl FnOnce() -> Result<T>) -> Result<T> {
        let outcome = catch(steps);
        let outcome = outcome.unwrap_or_else(|panic| Err(candle_core::Error::msg(panic)));
        if let Err(error) = &outcome {
            let why = format!("{} has failed here: {}", self.site.call, one_line(error));
            // What failed first is what the others wait for.
            drop(self.wire.broken.set(why));
        }
        outcome
    }

    /// What each member hands to all, by rank: as many bytes as this one's.
    fn exchange(&self, own: Vec<u8>) -> Vec<Vec<u8>> {
        let mut others = self.site.members().to_vec();
        others.remove(self.site.rank);
        let arrived = self.wire.link.exchange(own.clone(), &others, self.wire.patience);
        let mut all = arrived.unwrap_or_else(|broken| self.end(broken));
        all.insert(self.site.rank, own);
        all
    }

    /// Sends items `part(n)` of `source`, which has one dimension, to each rank n; returns what they
    /// have for this one, `n_items(n)` items of rank n, and what it has for itself, by rank.
    pub(super) fn swap(
        &self,
        source: Tensor,
        part: impl Fn(usize) -> Range<usize>,
        n_items: impl Fn(usize) -> usize,
    ) -> Result<Vec<Tensor>> {
        let mut swap = Swap::new(self.site, source, part, n_items)?;
        swap.start(self);
        swap.wait()
    }

    /// Ends the program: what was started could not be taken back.
    fn end(&self, broken: Broken) -> ! {
        let call = Arc::clone(&self.site.call);
        match broken {
            Broken::Failed(reason) => self.wire.ending.end(&format!("{reason} in {call}")),
            Broken::Late => self.wire.ending.end(&late(self.site, self.wire.patience).to_string()),
        }
    }
}

/// What a process says that has waited for too long; over NCCL it does not know for whom.
pub(super) fn late(site: &Site, after: Duration) -> CollectiveError {
    CollectiveError::Deadline {
        slot: site.slot(),
        missing: Vec::new(),
        call: Arc::clone(&site.call),
        after,
    }
}

/// The n-th of the words of a header.
#[expect(clippy::expect_used, reason = "all headers are of two words")]
fn word(header: &[u8], n: usize) -> [u8; 8] {
    header.as_chunks().0.get(n).copied().expect("a header has two words")
}

/// What a rank sends to each rank of its group, and receives of each.
#[derive(Debug)]
pub(super) struct Swap {
    own_rank: usize,
    source: Tensor,
    /// The items of the source for each rank, itself included.
    outgoing: Vec<Range<usize>>,
    /// Made where the swap is, before it is started: on the device, it is then there before what is
    /// computed in the meantime.
    destination: Tensor,
    /// The items of the destination from each rank; none from itself.
    incoming: Vec<Range<usize>>,
    /// What the device has begun by now, the making of both tensors.
    ready: Option<Arc<CudaEvent>>,
    moving: Option<Box<dyn Moving>>,
}

impl Swap {
    /// Of `source`, which has one dimension, items `part(n)` go to rank n, and `n_items(n)` come from
    /// there.
    pub(super) fn new(
        site: &Site,
        source: Tensor,
        part: impl Fn(usize) -> Range<usize>,
        n_items: impl Fn(usize) -> usize,
    ) -> Result<Self> {
        let mut end = 0;
        let place = |rank| {
            let n_items = if rank == site.rank { 0 } else { n_items(rank) };
            let start = end;
            end += n_items.next_multiple_of(ALIGNMENT);
            start..start + n_items
        };
        let incoming = (0..site.size()).map(place).collect();
        let destination = Tensor::zeros(end.max(1), source.dtype(), source.device())?;
        Ok(Self {
            own_rank: site.rank,
            outgoing: (0..site.size()).map(part).collect(),
            ready: begun(source.device())?,
            source,
            destination,
            incoming,
            moving: None,
        })
    }

    /// Starts the transfer, of which both sides know by now that it is to be.
    pub(super) fn start(&mut self, call: &Call<'_>) {
        let members = call.site.members();
        let others = |parts: &[Range<usize>]| -> Vec<(usize, Range<usize>)> {
            let of_slots = members.iter().copied().zip(parts.iter().cloned()).enumerate();
            let others = of_slots.filter(|(rank, _)| *rank != self.own_rank);
            others.map(|(_, of_slot)| of_slot).filter(|(_, part)| !part.is_empty()).collect()
        };
        let transfer = Transfer {
            call: Arc::clone(&call.site.call),
            ready: self.ready.clone(),
            source: self.source.clone(),
            outgoing: others(&self.outgoing),
            destination: self.destination.clone(),
            incoming: others(&self.incoming),
        };
        if transfer.outgoing.is_empty() && transfer.incoming.is_empty() {
            return;
        }
        let moving = call.wire.link.transfer(transfer, call.wire.deadline);
        self.moving = Some(moving.unwrap_or_else(|broken| call.end(broken)));
    }

    /// What each rank has for this one, by rank, once it has been started: on the device, what
    /// follows comes after its arrival.
    pub(super) fn wait(&self) -> Result<Vec<Tensor>> {
        if let Some(moving) = &self.moving {
            moving.order()?;
        }
        let part = |(rank, place): (usize, &Range<usize>)| {
            let (x, place) = if rank == self.own_rank {
                (&self.source, &self.outgoing[rank])
            } else {
                (&self.destination, place)
            };
            x.narrow(0, place.start, place.len())
        };
        self.incoming.iter().enumerate().map(part).collect()
    }
}

/// An event of what a device has begun by now.
fn begun(device: &Device) -> Result<Option<Arc<CudaEvent>>> {
    let Device::Cuda(cuda) = device else { return Ok(None) };
    let event = cuda.cuda_stream().record_event(None).map_err(candle_core::Error::wrap)?;
    Ok(Some(Arc::new(event)))
}

/// A tensor of no items: a view, since CUDA has no memory of no bytes.
pub(super) fn nothing(dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::zeros(1, dtype, device)?.narrow(0, 0, 0)
}
