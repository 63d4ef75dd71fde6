//! The engine of one process: replicas are threads and hand each other tensors.

mod exchange;
mod lists;
mod rendezvous;
mod wire;

use std::{
    num::NonZeroU64,
    sync::Arc,
    time::{Duration, Instant},
};

use candle_core::{Result, Tensor};

use crate::{
    device::to_device::{copied, n_bytes, on_host},
    engine::{
        Backend, Engine, Gathered, Message, PendingCollective, Purpose, Site, Wanted, Work,
        threads::{
            exchange::{Contribution, Exchange, ListWork, tensors_at},
            lists::{Job, concat_flat},
            rendezvous::Rendezvous,
            wire::{Wire, wait_until},
        },
        traffic::Counter,
    },
    error::{self, Error},
    reduce::{self, Reduction},
};

/// Up to how many bytes every member makes its results by itself: a second wait would cost more
/// than the work.
const SMALL_BYTES: usize = 16 << 10;

/// The slots of a mesh that are threads of this process.
#[derive(Debug)]
pub(crate) struct Threads {
    counters: Arc<[Counter]>,
    deadline: Option<Duration>,
    /// Of each slot, if a network is simulated.
    wires: Option<Arc<[Wire]>>,
}

impl Threads {
    pub(crate) fn new(
        slots: usize,
        deadline: Option<Duration>,
        bytes_per_second: Option<NonZeroU64>,
    ) -> Self {
        let wires = bytes_per_second.map(|rate| (0..slots).map(|_| Wire::new(rate)).collect());
        Self { counters: (0..slots).map(|_| Counter::default()).collect(), deadline, wires }
    }
}

impl Backend for Threads {
    fn begin(&self) -> Vec<Arc<dyn Engine>> {
        let slots = self.counters.len();
        let rendezvous = Arc::new(Rendezvous::new(slots, self.deadline));
        let engine = |slot| -> Arc<dyn Engine> {
            let counters = Arc::clone(&self.counters);
            let rendezvous = Arc::clone(&rendezvous);
            Arc::new(ThreadsEngine { rendezvous, slot, counters, wires: self.wires.clone() })
        };
        (0..slots).map(engine).collect()
    }

    fn counters(&self) -> &[Counter] {
        &self.counters
    }

    fn process_allgather(
        &self,
        _: Purpose,
        lists: error::Result<Vec<Vec<Tensor>>>,
    ) -> error::Result<Vec<Vec<Tensor>>> {
        lists
    }
}

/// One replica's access to the rendezvous of a call.
#[derive(Debug)]
struct ThreadsEngine {
    rendezvous: Arc<Rendezvous>,
    slot: usize,
    counters: Arc<[Counter]>,
    wires: Option<Arc<[Wire]>>,
}

impl ThreadsEngine {
    /// When what is handed in now has arrived, if a network is simulated.
    fn arrival(&self, work: &Work) -> Option<Instant> {
        self.wires.as_ref().map(|wires| wires[self.slot].arrival(work))
    }
}

/// A collective of lists that one member has contributed to.
#[derive(Debug)]
struct Started {
    rendezvous: Arc<Rendezvous>,
    site: Site,
    exchange: Arc<Exchange>,
    job: Job,
    arrival: Option<Instant>,
}

impl PendingCollective for Started {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        let Self { rendezvous, site, exchange, job, arrival } = *self;
        rendezvous.complete(&site, &exchange)?;
        let results = job.results(&rendezvous, &site, &exchange);
        arrival.into_iter().for_each(wait_until);
        results
    }
}

impl Engine for ThreadsEngine {
    fn all_reduce(&self, site: &Site, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        if n_bytes(x) > SMALL_BYTES {
            let list = vec![x.clone()];
            let work = Work::Reduce { list, wanted: Wanted::Everything, reduction };
            let mut sums = self.run(site, work)?;
            return Ok(sums.swap_remove(0));
        }
        let exchange = self.rendezvous.meet(site, snapshot(x)?.into(), None)?;
        reduce::whole(&exchange.tensors_at(0), reduction)?.to_device(x.device())
    }

    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Gathered> {
        let own = if n_bytes(x) <= SMALL_BYTES { snapshot(x)? } else { on_host(x)? };
        let lay_out = |contributions: &[Contribution]| {
            let parts = tensors_at(contributions, 0);
            let is_small = parts.iter().all(|part| n_bytes(part) <= SMALL_BYTES);
            (!is_small).then(|| concat_flat(parts))
        };
        let exchange = self.rendezvous.meet(site, own.into(), Some(&lay_out))?;
        let parts = exchange.tensors_at(0);
        let Some(ListWork { work, .. }) = exchange.work()? else {
            let parts = parts.iter().map(|part| part.to_device(x.device()));
            return Ok(Gathered::Parts(parts.collect::<Result<_>>()?));
        };
        self.rendezvous.work(site, &exchange, work)?;
        let shapes = parts.iter().map(|part| part.dims().to_vec()).collect();
        Ok(Gathered::EndToEnd { items: work.result(0)?.to_device(x.device())?, shapes })
    }

    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let device = parts[site.rank].device();
        let tensors = parts.iter().map(snapshot).collect::<Result<_>>()?;
        let contribution = Contribution { tensors, wanted: Vec::new() };
        let exchange = self.rendezvous.meet(site, contribution, None)?;
        exchange.tensors_at(site.rank).iter().map(|tensor| tensor.to_device(device)).collect()
    }

    fn receive(&self, site: &Site, message: &Message<'_>) -> Result<Option<Tensor>> {
        // Ranks that only receive copy nothing, and share one copy of the message.
        let contribution =
            if message.is_sent { snapshot(message.x)?.into() } else { Contribution::default() };
        let exchange = self.rendezvous.meet(site, contribution, None)?;
        let device = message.x.device();
        message.from.map(|from| exchange.first(from).to_device(device)).transpose()
    }

    fn run(&self, site: &Site, work: Work) -> Result<Vec<Tensor>> {
        let arrival = self.arrival(&work);
        let (job, contribution) = Job::new(work)?;
        let lay_out = |contributions: &[Contribution]| job.lay_out(contributions);
        let exchange = self.rendezvous.meet(site, contribution, Some(&lay_out))?;
        let results = job.results(&self.rendezvous, site, &exchange);
        arrival.into_iter().for_each(wait_until);
        results
    }

    fn start(&self, site: &Site, work: Work) -> Result<Box<dyn PendingCollective>> {
        let arrival = self.arrival(&work);
        let (job, contribution) = Job::new(work)?;
        let lay_out = |contributions: &[Contribution]| job.lay_out(contributions);
        let exchange = self.rendezvous.start(site, contribution, &lay_out)?;
        let rendezvous = Arc::clone(&self.rendezvous);
        Ok(Box::new(Started { rendezvous, site: site.clone(), exchange, job, arrival }))
    }

    fn barrier(&self, site: &Site) -> Result<()> {
        self.rendezvous.meet(site, Contribution::default(), None).map(drop)
    }

    fn counter(&self) -> &Counter {
        &self.counters[self.slot]
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
fn snapshot(x: &Tensor) -> Result<Tensor> {
    if x.device().is_cpu() { copied(x) } else { on_host(x) }
}
