//! The engine of a mesh in one process: replicas are threads, and exchange tensors through memory.

mod exchange;
mod lists;
mod rendezvous;

use std::{sync::Arc, time::Duration};

use candle_core::{Result, Tensor};

use crate::{
    device::to_device::{contiguous_copy, n_bytes, to_host},
    engine::{
        AllgatherPurpose, Backend, Engine, GatheredTensors, GroupContext, ListRequest,
        PendingCollective, SendReceive,
        threads::{
            exchange::{Contribution, GroupExchange, ListWork, nth_of_each_member},
            lists::{ListOp, ListReduction, concat_flat},
            rendezvous::Rendezvous,
        },
        traffic::TrafficCounter,
    },
    error::{self, Error},
    reduce::{self, Reduction},
};

/// The size, in bytes, up to which every member computes the complete result. For results of this
/// size, a second wait would cost more than the computation.
const SMALL_BYTES: usize = 16 << 10;

/// The slots of a mesh as threads of this process.
#[derive(Debug)]
pub(crate) struct ThreadBackend {
    counters: Arc<[TrafficCounter]>,
    deadline: Option<Duration>,
}

impl ThreadBackend {
    pub(crate) fn new(slots: usize, deadline: Option<Duration>) -> Self {
        Self { counters: (0..slots).map(|_| TrafficCounter::default()).collect(), deadline }
    }
}

impl Backend for ThreadBackend {
    fn begin(&self) -> Vec<Arc<dyn Engine>> {
        let slots = self.counters.len();
        let rendezvous = Arc::new(Rendezvous::new(slots, self.deadline));
        (0..slots)
            .map(|slot| -> Arc<dyn Engine> {
                let counters = Arc::clone(&self.counters);
                let rendezvous = Arc::clone(&rendezvous);
                Arc::new(ThreadEngine { rendezvous, slot, counters })
            })
            .collect()
    }

    fn counters(&self) -> &[TrafficCounter] {
        &self.counters
    }

    fn process_allgather(
        &self,
        _: AllgatherPurpose,
        lists: error::Result<Vec<Vec<Tensor>>>,
    ) -> error::Result<Vec<Vec<Tensor>>> {
        lists
    }
}

/// One replica's access to the rendezvous of a call.
#[derive(Debug)]
struct ThreadEngine {
    rendezvous: Arc<Rendezvous>,
    slot: usize,
    counters: Arc<[TrafficCounter]>,
}

impl ThreadEngine {
    fn run_list_op(
        &self,
        ctx: &GroupContext,
        op: &ListOp,
        contribution: Contribution,
    ) -> Result<Vec<Tensor>> {
        let plan = |contributions: &[Contribution]| op.plan(contributions);
        let exchange = self.rendezvous.contribute_and_wait(ctx, contribution, Some(&plan))?;
        op.compute_results(&self.rendezvous, ctx, &exchange)
    }
}

/// A started collective on lists.
#[derive(Debug)]
struct StartedCollective {
    rendezvous: Arc<Rendezvous>,
    ctx: GroupContext,
    exchange: Arc<GroupExchange>,
    op: ListOp,
}

impl PendingCollective for StartedCollective {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        let Self { rendezvous, ctx, exchange, op } = *self;
        rendezvous.wait_for_members(&ctx, &exchange)?;
        op.compute_results(&rendezvous, &ctx, &exchange)
    }
}

impl Engine for ThreadEngine {
    fn all_reduce(
        &self,
        ctx: &GroupContext,
        list: &[Tensor],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        if let [x] = list
            && n_bytes(x) <= SMALL_BYTES
        {
            let exchange = self.rendezvous.contribute_and_wait(ctx, vec![snapshot(x)?], None)?;
            let sum = reduce::reduce_tensors(&exchange.nth_of_each_member(0), reduction)?;
            return Ok(vec![sum.to_device(x.device())?]);
        }
        let (op, contribution) = ListReduction::new(list, None, reduction)?;
        self.run_list_op(ctx, &ListOp::Reduce(op), contribution)
    }

    fn all_gather(&self, ctx: &GroupContext, x: &Tensor) -> Result<GatheredTensors> {
        let own = if n_bytes(x) <= SMALL_BYTES { snapshot(x)? } else { to_host(x)? };
        let exchange = self.rendezvous.contribute_and_wait(ctx, vec![own], Some(&plan_gather))?;
        let parts = exchange.nth_of_each_member(0);
        let Some(ListWork { work, .. }) = exchange.work()? else {
            let parts = parts.iter().map(|part| part.to_device(x.device()));
            return Ok(GatheredTensors::Parts(parts.collect::<Result<_>>()?));
        };
        self.rendezvous.finish_work(ctx, &exchange, work)?;
        let shapes = parts.iter().map(|part| part.dims().to_vec()).collect();
        Ok(GatheredTensors::Concatenated { items: work.result(0)?.to_device(x.device())?, shapes })
    }

    fn all_to_all(&self, ctx: &GroupContext, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let device = parts[ctx.rank].device();
        let tensors = parts.iter().map(snapshot).collect::<Result<_>>()?;
        let exchange = self.rendezvous.contribute_and_wait(ctx, tensors, None)?;
        exchange
            .nth_of_each_member(ctx.rank)
            .iter()
            .map(|tensor| tensor.to_device(device))
            .collect()
    }

    fn send_receive(
        &self,
        ctx: &GroupContext,
        message: &SendReceive<'_>,
    ) -> Result<Option<Tensor>> {
        // Only the sender copies its tensor; all receivers share this copy.
        let contribution =
            if message.is_sent { vec![snapshot(message.x)?] } else { Contribution::new() };
        let exchange = self.rendezvous.contribute_and_wait(ctx, contribution, None)?;
        let device = message.x.device();
        message.from.map(|from| exchange.only_tensor(from).to_device(device)).transpose()
    }

    fn run_list(&self, ctx: &GroupContext, request: ListRequest) -> Result<Vec<Tensor>> {
        let (op, contribution) = ListOp::new(request)?;
        self.run_list_op(ctx, &op, contribution)
    }

    fn start_list(
        &self,
        ctx: &GroupContext,
        request: ListRequest,
    ) -> Result<Box<dyn PendingCollective>> {
        let (op, contribution) = ListOp::new(request)?;
        let exchange = self
            .rendezvous
            .contribute(ctx, contribution, &|contributions| op.plan(contributions))?;
        let rendezvous = Arc::clone(&self.rendezvous);
        Ok(Box::new(StartedCollective { rendezvous, ctx: ctx.clone(), exchange, op }))
    }

    fn barrier(&self, ctx: &GroupContext) -> Result<()> {
        self.rendezvous.contribute_and_wait(ctx, Contribution::new(), None).map(drop)
    }

    fn counter(&self) -> &TrafficCounter {
        &self.counters[self.slot]
    }

    fn finish(&self) {
        self.rendezvous.finish(self.slot);
    }

    fn fail(&self, error: Error) {
        self.rendezvous.fail(self.slot, error);
    }

    fn deadline_passed(&self) -> bool {
        self.rendezvous.deadline_passed()
    }

    fn failure(&self) -> Option<Error> {
        self.rendezvous.take_failure()
    }
}

/// Plans the concatenation of the members' tensors, unless all of them are small.
fn plan_gather(contributions: &[Contribution]) -> Option<Result<ListWork>> {
    let parts = nth_of_each_member(contributions, 0);
    let is_small = parts.iter().all(|part| n_bytes(part) <= SMALL_BYTES);
    (!is_small).then(|| concat_flat(parts))
}

/// Returns a copy of a tensor on the processor, so that its owner can change the tensor while other
/// members read the copy.
fn snapshot(x: &Tensor) -> Result<Tensor> {
    if x.device().is_cpu() { contiguous_copy(x) } else { to_host(x) }
}
