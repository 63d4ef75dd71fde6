//! The collectives without their gradients: what an engine is asked for, and what is made of its
//! answer.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};

use crate::{
    device::to_device::{copied, in_one_piece, n_bytes},
    engine::{
        Engine, Finished, Gathered, Message, PendingCollective, Site, Wanted, Work,
        layout::{Run, RunLayout},
        traffic::Kind,
    },
    error::{self, CollectiveError, Error},
    reduce::Reduction,
    replica::{alone, pending::Outstanding},
};

/// Up to how many bytes every member makes all of a sum of which it keeps a part: to say what each
/// wants would take longer.
const SMALL_BYTES: usize = 16 << 10;

/// What one replica asks of its engine, in one call.
#[derive(Clone, Debug)]
pub(crate) struct Collectives {
    engine: Arc<dyn Engine>,
    outstanding: Arc<Outstanding>,
}

impl Collectives {
    pub(crate) fn new(engine: Arc<dyn Engine>) -> Self {
        Self { engine, outstanding: Arc::default() }
    }

    pub(crate) fn all_reduce(
        &self,
        site: &Site,
        x: &Tensor,
        reduction: Reduction,
    ) -> Result<Tensor> {
        // A group of one gets a copy, as others do: the result must not change when the argument is
        // set.
        if site.size() == 1 {
            return copied(&x.detach());
        }
        self.count(site, Kind::AllReduce, n_bytes(x));
        self.engine.all_reduce(site, &x.detach(), reduction)
    }

    /// Starts the sum of one tensor.
    pub(crate) fn start_sum(&self, site: &Site, x: &Tensor) -> Result<Box<dyn PendingCollective>> {
        self.count(site, Kind::AllReduce, n_bytes(x));
        self.start(site, sums(vec![x.detach()], Wanted::Everything))
    }

    /// The reductions of all tensors of a list.
    pub(crate) fn reduce_list(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        self.count(site, Kind::AllReduce, list.iter().map(n_bytes).sum());
        self.run(site, reductions(list, Wanted::Everything, reduction))
    }

    /// The sums of those of the list's tensors that are `wanted` here.
    pub(crate) fn sum_list(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        wanted: &[usize],
    ) -> Result<Vec<Tensor>> {
        self.count(site, Kind::AllReduce, list.iter().map(n_bytes).sum());
        self.run(site, sums(list, Wanted::Own(wanted.to_vec())))
    }

    /// The sum, for the member of rank `root` alone.
    pub(crate) fn sum_for(&self, site: &Site, x: &Tensor, root: usize) -> Result<Option<Tensor>> {
        self.count(site, Kind::Reduce, n_bytes(x));
        let all = Run { tensor: 0, items: 0..x.elem_count() };
        let of_rank = |rank| if rank == root { vec![all.clone()] } else { Vec::new() };
        let wanted = Wanted::ByRank((0..site.size()).map(of_rank).collect());
        let mut sums = self.run(site, sums(vec![x.detach()], wanted))?;
        sums.pop().map(|sum| sum.reshape(x.shape())).transpose()
    }

    /// The tensors of all members by rank, concatenated, and the size of each in `dim`.
    pub(crate) fn gather(
        &self,
        site: &Site,
        x: &Tensor,
        dim: usize,
    ) -> Result<(Tensor, Vec<usize>)> {
        self.count(site, Kind::AllGather, n_bytes(x));
        let gathered = self.engine.all_gather(site, &x.detach())?;
        let sizes = gathered.sizes(dim);
        Ok((concatenated(gathered, dim, &sizes)?, sizes))
    }

    /// The part of the sum that belongs to this rank, if rank n gets `sizes[n]` rows.
    pub(crate) fn sum_and_scatter(
        &self,
        site: &Site,
        x: &Tensor,
        dim: usize,
        sizes: &[usize],
    ) -> Result<Tensor> {
        self.count(site, Kind::ReduceScatter, n_bytes(x));
        if site.size() > 1 && n_bytes(x) <= SMALL_BYTES {
            let sum = self.engine.all_reduce(site, &x.detach(), Reduction::Sum)?;
            let start = sizes[..site.rank].iter().sum();
            return copied(&sum.narrow(dim, start, sizes[site.rank])?);
        }
        // Parts along the first dimension are runs of items.
        let rows_first = in_one_piece(&x.detach().transpose(0, dim)?)?;
        let row_items: usize = rows_first.dims()[1..].iter().product();
        let mut end = 0;
        let run = |&rows: &usize| {
            let start = end;
            end += rows * row_items;
            vec![Run { tensor: 0, items: start..end }]
        };
        let wanted = Wanted::ByRank(sizes.iter().map(run).collect());
        let mut own_dims = rows_first.dims().to_vec();
        own_dims[0] = sizes[site.rank];
        let sum = self.run(site, sums(vec![rows_first], wanted))?.swap_remove(0);
        in_one_piece(&sum.reshape(own_dims)?.transpose(0, dim)?)
    }

    /// The tensors of a layout, of which this member has `own` runs.
    pub(crate) fn gather_runs(
        &self,
        site: &Site,
        own: Vec<Tensor>,
        layout: &RunLayout,
        device: &Device,
    ) -> Result<Vec<Tensor>> {
        self.run(site, self.gathering(site, own, layout, device))
    }

    /// Starts [`gather_runs`](Self::gather_runs).
    pub(crate) fn start_gather_runs(
        &self,
        site: &Site,
        own: Vec<Tensor>,
        layout: &RunLayout,
        device: &Device,
    ) -> Result<Box<dyn PendingCollective>> {
        self.start(site, self.gathering(site, own, layout, device))
    }

    fn gathering(
        &self,
        site: &Site,
        own: Vec<Tensor>,
        layout: &RunLayout,
        device: &Device,
    ) -> Work {
        self.count(site, Kind::AllGather, own.iter().map(n_bytes).sum());
        let own = own.into_iter().map(|run| run.detach()).collect();
        Work::Gather { own, layout: layout.clone(), device: device.clone() }
    }

    /// The sums of the runs of a layout that this member owns.
    pub(crate) fn reduce_runs(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        layout: &RunLayout,
    ) -> Result<Vec<Tensor>> {
        self.run(site, self.run_sums(site, list, layout))
    }

    /// Starts [`reduce_runs`](Self::reduce_runs).
    pub(crate) fn start_reduce_runs(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        layout: &RunLayout,
    ) -> Result<Box<dyn PendingCollective>> {
        self.start(site, self.run_sums(site, list, layout))
    }

    fn run_sums(&self, site: &Site, list: Vec<Tensor>, layout: &RunLayout) -> Work {
        self.count(site, Kind::ReduceScatter, list.iter().map(n_bytes).sum());
        sums(list, Wanted::ByRank(Arc::clone(layout.by_rank())))
    }

    fn run(&self, site: &Site, work: Work) -> Result<Vec<Tensor>> {
        if site.size() == 1 { alone::run(work) } else { self.engine.run(site, work) }
    }

    fn start(&self, site: &Site, work: Work) -> Result<Box<dyn PendingCollective>> {
        let underway: Box<dyn PendingCollective> = if site.size() == 1 {
            Box::new(Finished(alone::run(work)?))
        } else {
            self.engine.start(site, work)?
        };
        Ok(self.outstanding.note(&site.call, underway))
    }

    pub(crate) fn permute(
        &self,
        site: &Site,
        x: &Tensor,
        pairs: &[(usize, usize)],
    ) -> Result<Tensor> {
        let from = pairs.iter().find(|(_, to)| *to == site.rank).map(|(from, _)| *from);
        let is_sent = pairs.iter().any(|(from, _)| *from == site.rank);
        self.count(site, Kind::Permute, if is_sent { n_bytes(x) } else { 0 });
        match self.engine.receive(site, &Message { x: &x.detach(), is_sent, from })? {
            Some(received) => Ok(received),
            None => x.zeros_like(),
        }
    }

    /// The `x` of the member of rank `root`.
    #[expect(clippy::expect_used, reason = "an engine returns something from whom it is asked")]
    pub(crate) fn broadcast(&self, site: &Site, x: &Tensor, root: usize) -> Result<Tensor> {
        let is_sent = site.rank == root;
        self.count(site, Kind::Broadcast, if is_sent { n_bytes(x) } else { 0 });
        let message = Message { x: &x.detach(), is_sent, from: Some(root) };
        Ok(self.engine.receive(site, &message)?.expect("the root has sent something"))
    }

    pub(crate) fn exchange(
        &self,
        site: &Site,
        x: &Tensor,
        split: usize,
        concat: usize,
    ) -> Result<Tensor> {
        let rows = even_parts(x, split, site)?[0];
        let parts = (0..site.size())
            .map(|rank| x.detach().narrow(split, rank * rows, rows))
            .collect::<Result<_>>()?;
        self.count(site, Kind::AllToAll, n_bytes(x));
        cat(self.engine.all_to_all(site, parts)?, concat)
    }

    pub(crate) fn barrier(&self, site: &Site) -> Result<()> {
        self.count(site, Kind::Barrier, 0);
        self.engine.barrier(site)
    }

    /// Counts a collective in which so many bytes are handed over; to nobody in a group of one.
    fn count(&self, site: &Site, kind: Kind, bytes: usize) {
        if site.size() > 1 {
            self.engine.counter().count(kind, bytes);
        }
    }

    /// Says how the replica in this slot has ended.
    pub(crate) fn end(&self, slot: usize, outcome: error::Result<()>) {
        match (outcome, self.outstanding.first()) {
            (Ok(()), None) => self.engine.finish(),
            (Ok(()), Some(call)) => {
                self.engine.fail(CollectiveError::NeverAwaited { slot, call }.into());
            }
            (Err(error), _) => self.engine.fail(error),
        }
    }

    /// Ends the call for all with an error of its own kind, and returns what this replica is to
    /// return.
    pub(crate) fn refuse(&self, error: Error) -> candle_core::Error {
        let message = error.to_string();
        self.engine.fail(error);
        candle_core::Error::msg(message)
    }
}

/// The size of each rank's part, all equal.
pub(crate) fn even_parts(x: &Tensor, dim: usize, site: &Site) -> Result<Vec<usize>> {
    let rows = x.dims()[dim];
    if !rows.is_multiple_of(site.size()) {
        bail!(
            "{}: dimension {dim} of shape {:?} does not split evenly over {} replicas",
            site.call.op,
            x.dims(),
            site.size()
        );
    }
    Ok(vec![rows / site.size(); site.size()])
}

fn sums(list: Vec<Tensor>, wanted: Wanted) -> Work {
    reductions(list, wanted, Reduction::Sum)
}

fn reductions(list: Vec<Tensor>, wanted: Wanted, reduction: Reduction) -> Work {
    let list = list.into_iter().map(|x| x.detach()).collect();
    Work::Reduce { list, wanted, reduction }
}

/// What was gathered, side by side in `dim`, where the sizes of the parts are these.
fn concatenated(gathered: Gathered, dim: usize, sizes: &[usize]) -> Result<Tensor> {
    if let Gathered::EndToEnd { items, shapes } = &gathered {
        let mut whole = shapes[0].clone();
        whole[dim] = sizes.iter().sum();
        if items.elem_count() == 0 || whole[..dim].iter().product::<usize>() == 1 {
            // Side by side is end to end.
            return items.reshape(whole);
        }
    }
    cat(gathered.into_parts()?, dim)
}

fn cat(parts: Vec<Tensor>, dim: usize) -> Result<Tensor> {
    match <[Tensor; 1]>::try_from(parts) {
        Ok([only]) => Ok(only),
        Err(parts) => Tensor::cat(&parts, dim),
    }
}
