//! The collectives without their gradients: requests to an engine, and the conversion of the
//! engine's results.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};

use crate::{
    device::to_device::{contiguous_copy, n_bytes, to_contiguous},
    engine::{
        Engine, FinishedCollective, GatheredTensors, GroupContext, ListRequest, PendingCollective,
        SendReceive,
        layout::{Run, RunLayout},
        traffic::CollectiveKind,
    },
    error::{self, CollectiveError, Error},
    reduce::Reduction,
    replica::{pending::OutstandingCollectives, single},
};

/// The size, in bytes, up to which every member computes a complete sum even if it keeps only a
/// part. For sums of this size, a reduction in parts would take longer.
const SMALL_BYTES: usize = 16 << 10;

/// The collectives of one replica in one call.
#[derive(Clone, Debug)]
pub(crate) struct Collectives {
    engine: Arc<dyn Engine>,
    outstanding: Arc<OutstandingCollectives>,
}

impl Collectives {
    pub(crate) fn new(engine: Arc<dyn Engine>) -> Self {
        Self { engine, outstanding: Arc::default() }
    }

    /// Returns the reductions of all tensors of a list.
    pub(crate) fn all_reduce(
        &self,
        ctx: &GroupContext,
        list: &[Tensor],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        // Copy in a group of one as well: the result must not change when the argument is set in
        // place.
        if ctx.size() == 1 {
            return list.iter().map(|x| contiguous_copy(&x.detach())).collect();
        }
        self.count(ctx, CollectiveKind::AllReduce, list.iter().map(n_bytes).sum());
        let list: Vec<Tensor> = list.iter().map(Tensor::detach).collect();
        self.engine.all_reduce(ctx, &list, reduction)
    }

    /// Returns the sum on rank `root`, and `None` on the other ranks.
    pub(crate) fn sum_for(
        &self,
        ctx: &GroupContext,
        x: &Tensor,
        root: usize,
    ) -> Result<Option<Tensor>> {
        self.count(ctx, CollectiveKind::Reduce, n_bytes(x));
        let mut runs = vec![Vec::new(); ctx.size()];
        runs[root].push(Run { tensor: 0, items: 0..x.elem_count() });
        let request = ListRequest::Sum { list: vec![x.detach()], runs_by_rank: runs.into() };
        let mut sums = self.run(ctx, request)?;
        sums.pop().map(|sum| sum.reshape(x.shape())).transpose()
    }

    /// Returns the tensors of all members, concatenated in `dim` by rank, and the size of each
    /// tensor in `dim`.
    pub(crate) fn gather(
        &self,
        ctx: &GroupContext,
        x: &Tensor,
        dim: usize,
    ) -> Result<(Tensor, Vec<usize>)> {
        self.count(ctx, CollectiveKind::AllGather, n_bytes(x));
        let gathered = self.engine.all_gather(ctx, &x.detach())?;
        let sizes = gathered.sizes(dim);
        Ok((concat_gathered(gathered, dim, &sizes)?, sizes))
    }

    /// Returns this rank's part of the sum, cut in `dim`: rank n gets `sizes[n]` rows.
    pub(crate) fn sum_and_scatter(
        &self,
        ctx: &GroupContext,
        x: &Tensor,
        dim: usize,
        sizes: &[usize],
    ) -> Result<Tensor> {
        self.count(ctx, CollectiveKind::ReduceScatter, n_bytes(x));
        if ctx.size() > 1 && n_bytes(x) <= SMALL_BYTES {
            let sum = self.engine.all_reduce(ctx, &[x.detach()], Reduction::Sum)?.swap_remove(0);
            let start = sizes[..ctx.rank].iter().sum();
            return contiguous_copy(&sum.narrow(dim, start, sizes[ctx.rank])?);
        }
        // Make `dim` the first dimension, along which parts are ranges of items.
        let rows_first = to_contiguous(&x.detach().transpose(0, dim)?)?;
        let row_items: usize = rows_first.dims()[1..].iter().product();
        let mut end = 0;
        let runs = sizes.iter().map(|rows| {
            let start = end;
            end += rows * row_items;
            vec![Run { tensor: 0, items: start..end }]
        });
        let runs_by_rank = runs.collect();
        let mut own_dims = rows_first.dims().to_vec();
        own_dims[0] = sizes[ctx.rank];
        let request = ListRequest::Sum { list: vec![rows_first], runs_by_rank };
        let sum = self.run(ctx, request)?.swap_remove(0);
        to_contiguous(&sum.reshape(own_dims)?.transpose(0, dim)?)
    }

    /// Returns the request for the tensors of a layout; `own` are this member's runs.
    pub(crate) fn gather_request(
        &self,
        ctx: &GroupContext,
        own: Vec<Tensor>,
        layout: &RunLayout,
        device: &Device,
    ) -> ListRequest {
        self.count(ctx, CollectiveKind::AllGather, own.iter().map(n_bytes).sum());
        let own = own.into_iter().map(|run| run.detach()).collect();
        ListRequest::Gather { own, layout: layout.clone(), device: device.clone() }
    }

    /// Returns the request for the sums of this member's runs of a layout.
    pub(crate) fn reduce_request(
        &self,
        ctx: &GroupContext,
        list: Vec<Tensor>,
        layout: &RunLayout,
    ) -> ListRequest {
        self.count(ctx, CollectiveKind::ReduceScatter, list.iter().map(n_bytes).sum());
        let list = list.into_iter().map(|x| x.detach()).collect();
        ListRequest::Sum { list, runs_by_rank: Arc::clone(layout.by_rank()) }
    }

    /// Runs a request, and waits for its results.
    pub(crate) fn run(&self, ctx: &GroupContext, work: ListRequest) -> Result<Vec<Tensor>> {
        if ctx.size() == 1 { single::run(work) } else { self.engine.run_list(ctx, work) }
    }

    /// Starts a request without waiting for other members.
    pub(crate) fn start(
        &self,
        ctx: &GroupContext,
        work: ListRequest,
    ) -> Result<Box<dyn PendingCollective>> {
        let collective: Box<dyn PendingCollective> = if ctx.size() == 1 {
            Box::new(FinishedCollective(single::run(work)?))
        } else {
            self.engine.start_list(ctx, work)?
        };
        Ok(self.outstanding.track(&ctx.call, collective))
    }

    pub(crate) fn permute(
        &self,
        ctx: &GroupContext,
        x: &Tensor,
        pairs: &[(usize, usize)],
    ) -> Result<Tensor> {
        let from = pairs.iter().find(|(_, to)| *to == ctx.rank).map(|(from, _)| *from);
        let is_sent = pairs.iter().any(|(from, _)| *from == ctx.rank);
        self.count(ctx, CollectiveKind::Permute, if is_sent { n_bytes(x) } else { 0 });
        match self.engine.send_receive(ctx, &SendReceive { x: &x.detach(), is_sent, from })? {
            Some(received) => Ok(received),
            None => x.zeros_like(),
        }
    }

    /// Returns the tensor `x` of rank `root`.
    #[expect(
        clippy::expect_used,
        reason = "`send_receive` returns the tensor of the requested sender"
    )]
    pub(crate) fn broadcast(&self, ctx: &GroupContext, x: &Tensor, root: usize) -> Result<Tensor> {
        let is_sent = ctx.rank == root;
        self.count(ctx, CollectiveKind::Broadcast, if is_sent { n_bytes(x) } else { 0 });
        let message = SendReceive { x: &x.detach(), is_sent, from: Some(root) };
        Ok(self.engine.send_receive(ctx, &message)?.expect("the root has sent its tensor"))
    }

    pub(crate) fn exchange(
        &self,
        ctx: &GroupContext,
        x: &Tensor,
        split: usize,
        concat: usize,
    ) -> Result<Tensor> {
        let rows = even_parts(x, split, ctx)?[0];
        let parts = (0..ctx.size())
            .map(|rank| x.detach().narrow(split, rank * rows, rows))
            .collect::<Result<_>>()?;
        self.count(ctx, CollectiveKind::AllToAll, n_bytes(x));
        cat(self.engine.all_to_all(ctx, parts)?, concat)
    }

    pub(crate) fn barrier(&self, ctx: &GroupContext) -> Result<()> {
        self.count(ctx, CollectiveKind::Barrier, 0);
        self.engine.barrier(ctx)
    }

    /// Counts a collective with this many bytes, unless the group has only one replica.
    fn count(&self, ctx: &GroupContext, kind: CollectiveKind, bytes: usize) {
        if ctx.size() > 1 {
            self.engine.counter().count(kind, bytes);
        }
    }

    /// Records that the replica of a slot has ended with this outcome, and fails the call for an
    /// error or for a collective that was never awaited.
    pub(crate) fn record_end(&self, slot: usize, outcome: error::Result<()>) {
        match (outcome, self.outstanding.first()) {
            (Ok(()), None) => self.engine.finish(),
            (Ok(()), Some(call)) => {
                let call = call.to_string();
                self.engine.fail(CollectiveError::NeverAwaited { slot, call }.into());
            }
            (Err(error), _) => self.engine.fail(error),
        }
    }

    /// Fails the call for all replicas with an error, and returns a candle error with its message.
    pub(crate) fn fail_with(&self, error: Error) -> candle_core::Error {
        let message = error.to_string();
        self.engine.fail(error);
        candle_core::Error::msg(message)
    }
}

/// Returns the sizes of the ranks' parts if dimension `dim` is cut evenly.
pub(crate) fn even_parts(x: &Tensor, dim: usize, ctx: &GroupContext) -> Result<Vec<usize>> {
    let rows = x.dims()[dim];
    if !rows.is_multiple_of(ctx.size()) {
        bail!(
            "{}: dimension {dim} of shape {:?} does not split evenly over {} replicas",
            ctx.call.op,
            x.dims(),
            ctx.size()
        );
    }
    Ok(vec![rows / ctx.size(); ctx.size()])
}

/// Concatenates gathered tensors in `dim`; `sizes` are the tensors' sizes in `dim`.
fn concat_gathered(gathered: GatheredTensors, dim: usize, sizes: &[usize]) -> Result<Tensor> {
    if let GatheredTensors::Concatenated { items, shapes } = &gathered {
        let mut shape = shapes[0].clone();
        shape[dim] = sizes.iter().sum();
        if items.elem_count() == 0 || shape[..dim].iter().product::<usize>() == 1 {
            // Concatenation in this dimension does not change the order of the items.
            return items.reshape(shape);
        }
    }
    cat(gathered.into_parts()?, dim)
}

/// Concatenates tensors in `dim`; returns a single tensor unchanged.
fn cat(parts: Vec<Tensor>, dim: usize) -> Result<Tensor> {
    match <[Tensor; 1]>::try_from(parts) {
        Ok([only]) => Ok(only),
        Err(parts) => Tensor::cat(&parts, dim),
    }
}
