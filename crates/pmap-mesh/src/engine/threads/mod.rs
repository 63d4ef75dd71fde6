//! The engine of one process: replicas are threads and hand each other tensors.

pub(crate) mod rendezvous;

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};

use crate::{
    engine::{
        Engine, Site, on_host,
        threads::rendezvous::{Hub, Meeting},
    },
    error::Error,
    reduce::{self, Reduction},
};

/// Up to how many bytes every member reduces everything by itself: a second meeting would cost more
/// than the work.
const SMALL_BYTES: usize = 16 << 10;

/// One replica's access to the meetings of a call.
#[derive(Debug)]
pub(crate) struct Threads {
    hub: Arc<Hub>,
    slot: usize,
}

impl Threads {
    pub(crate) fn new(hub: Arc<Hub>, slot: usize) -> Self {
        Self { hub, slot }
    }

    fn meet(&self, site: &Site, tensors: Vec<Tensor>) -> Result<Arc<Meeting>> {
        self.hub.meet(self.slot, Arc::clone(&site.call), tensors)
    }

    /// Meets, lets every member work on what was brought, and meets again: before that nobody may
    /// change it.
    fn share<T>(
        &self,
        site: &Site,
        tensors: Vec<Tensor>,
        work: impl FnOnce(&Meeting) -> Result<T>,
    ) -> Result<T> {
        let meeting = self.meet(site, tensors)?;
        let result = work(&meeting)?;
        self.meet(site, Vec::new())?;
        Ok(result)
    }
}

impl Engine for Threads {
    fn all_reduce(&self, site: &Site, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let reduced = if x.elem_count() * x.dtype().size_in_bytes() <= SMALL_BYTES {
            let meeting = self.meet(site, vec![frozen(x)?])?;
            reduce::whole(&meeting.firsts(), reduction)?
        } else {
            let meeting = self.meet(site, vec![on_host(x)?])?;
            let board = meeting.board(|| reduce::board(x, site.size))?;
            let last = reduce::part(board, site.position, &meeting.firsts(), reduction)?;
            // Whoever filled the last part brings the result for all.
            let closing = self.meet(site, last.into_iter().collect())?;
            let result = closing.brought.iter().flatten().next();
            result
                .cloned()
                .ok_or_else(|| candle_core::Error::msg("a part of a reduction was not filled"))?
        };
        reduced.to_device(x.device())
    }

    fn reduce_lists(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        wanted: &[usize],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        let device = list.first().map_or(Device::Cpu, |first| first.device().clone());
        let list = list.iter().map(on_host).collect::<Result<_>>()?;
        self.share(site, list, |meeting| {
            wanted
                .iter()
                .map(|&index| reduce::whole(&meeting.nths(index)?, reduction)?.to_device(&device))
                .collect()
        })
    }

    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Vec<Tensor>> {
        let meeting = self.meet(site, vec![frozen(x)?])?;
        meeting.firsts().iter().map(|tensor| tensor.to_device(x.device())).collect()
    }

    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let device = parts.first().map_or(Device::Cpu, |first| first.device().clone());
        let meeting = self.meet(site, parts.iter().map(frozen).collect::<Result<_>>()?)?;
        meeting.nths(site.position)?.iter().map(|tensor| tensor.to_device(&device)).collect()
    }

    fn receive(&self, site: &Site, x: &Tensor, from: Option<usize>) -> Result<Option<Tensor>> {
        let meeting = self.meet(site, vec![frozen(x)?])?;
        from.map(|from| meeting.brought[from][0].to_device(x.device())).transpose()
    }

    fn barrier(&self, site: &Site) -> Result<()> {
        self.meet(site, Vec::new()).map(drop)
    }

    fn returned(&self) {
        self.hub.returned(self.slot);
    }

    fn failed(&self, error: Error) {
        self.hub.failed(self.slot, error);
    }
}

/// A copy on the processor, which the owner of the original cannot change while others still read.
fn frozen(x: &Tensor) -> Result<Tensor> {
    if x.device().is_cpu() { x.force_contiguous() } else { on_host(x) }
}
