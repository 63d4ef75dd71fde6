//! The engine of one process: replicas are threads and hand each other tensors.

mod rendezvous;

use std::{sync::Arc, time::Duration};

use candle_core::{Result, Tensor};

use crate::{
    engine::{Backend, Engine, Site, threads::rendezvous::Rendezvous},
    error::{self, Error},
    mesh::place::{copied, on_host},
    reduce::{self, Reduction},
};

/// Up to how many bytes every member reduces everything by itself: a second rendezvous would cost
/// more than the work.
const SMALL_BYTES: usize = 16 << 10;

/// The slots of a mesh that are threads of this process.
#[derive(Debug)]
pub(crate) struct Threads {
    slots: usize,
    deadline: Option<Duration>,
}

impl Threads {
    pub(crate) fn new(slots: usize, deadline: Option<Duration>) -> Self {
        Self { slots, deadline }
    }
}

impl Backend for Threads {
    fn begin(&self) -> Vec<Arc<dyn Engine>> {
        let rendezvous = Arc::new(Rendezvous::new(self.slots, self.deadline));
        let engine = |slot| -> Arc<dyn Engine> {
            Arc::new(ThreadsEngine { rendezvous: Arc::clone(&rendezvous), slot })
        };
        (0..self.slots).map(engine).collect()
    }

    fn process_allgather(&self, lists: Vec<Vec<Tensor>>) -> error::Result<Vec<Vec<Tensor>>> {
        Ok(lists)
    }
}

/// One replica's access to the rendezvous of a call.
#[derive(Debug)]
struct ThreadsEngine {
    rendezvous: Arc<Rendezvous>,
    slot: usize,
}

impl ThreadsEngine {
    /// Reduces a part of `x` in a buffer that all members fill, and shares the whole.
    fn reduce_parts(&self, site: &Site, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let inputs = self.rendezvous.meet(site, vec![on_host(x)?])?;
        let buffer = inputs.buffer(|| reduce::buffer(x, site.size()))?;
        let filled = reduce::part(buffer, site.rank, &inputs.firsts(), reduction)?;
        // The member that filled the last part has the result, and passes it to all.
        let results = self.rendezvous.meet(site, filled.into_iter().collect())?;
        Ok(results.only().clone())
    }
}

impl Engine for ThreadsEngine {
    fn all_reduce(&self, site: &Site, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let reduced = if x.elem_count() * x.dtype().size_in_bytes() <= SMALL_BYTES {
            let inputs = self.rendezvous.meet(site, vec![frozen(x)?])?;
            reduce::whole(&inputs.firsts(), reduction)?
        } else {
            self.reduce_parts(site, x, reduction)?
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
        let on_host = list.iter().map(on_host).collect::<Result<_>>()?;
        let inputs = self.rendezvous.meet(site, on_host)?;
        let sum = |&index: &usize| {
            reduce::whole(&inputs.nths(index)?, reduction)?.to_device(list[index].device())
        };
        let sums = wanted.iter().map(sum).collect::<Result<_>>()?;
        // Tensors that lie on the processor were not copied: before all have read them, nobody may
        // change them.
        self.barrier(site)?;
        Ok(sums)
    }

    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Vec<Tensor>> {
        let inputs = self.rendezvous.meet(site, vec![frozen(x)?])?;
        inputs.firsts().iter().map(|tensor| tensor.to_device(x.device())).collect()
    }

    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let device = parts[site.rank].device();
        let inputs =
            self.rendezvous.meet(site, parts.iter().map(frozen).collect::<Result<_>>()?)?;
        inputs.nths(site.rank)?.iter().map(|tensor| tensor.to_device(device)).collect()
    }

    fn receive(&self, site: &Site, x: &Tensor, from: Option<usize>) -> Result<Option<Tensor>> {
        let inputs = self.rendezvous.meet(site, vec![frozen(x)?])?;
        from.map(|from| inputs.first(from).to_device(x.device())).transpose()
    }

    fn barrier(&self, site: &Site) -> Result<()> {
        self.rendezvous.meet(site, Vec::new()).map(drop)
    }

    fn finish(&self) {
        self.rendezvous.finish(self.slot);
    }

    fn fail(&self, error: Error) {
        self.rendezvous.fail(self.slot, error);
    }

    fn is_late(&self) -> bool {
        self.rendezvous.is_late()
    }

    fn failure(&self) -> Option<Error> {
        self.rendezvous.take_failure()
    }
}

/// A copy on the processor, which the owner of the original cannot change while others still read.
fn frozen(x: &Tensor) -> Result<Tensor> {
    if x.device().is_cpu() { copied(x) } else { on_host(x) }
}
