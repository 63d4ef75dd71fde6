//! Collectives of lists of tensors: what goes together, and what becomes of what arrives.
//!
//! A job is packed where the replica is, so that on the device this comes before what is computed
//! next; its transfers may then be started by another thread.

use std::{collections::BTreeMap, ops::Range};

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};

use super::swap::{Call, Swap, nothing};
use crate::{
    device::to_device::filled,
    engine::{
        Site, Wanted, Work,
        layout::{Owned, Run, RunLayout},
    },
    reduce::{Reduction, elementwise, parts::balanced},
};

/// Up to how many bytes every member reduces everything by itself: a second transfer would take
/// longer.
const SMALL_BYTES: usize = 64 << 10;

/// How many bytes of small tensors are put together: some milliseconds of a fast link, beside which
/// the start of a transfer does not count; more would only take memory.
const BUCKET_BYTES: usize = 64 << 20;

/// A collective of lists, packed.
#[derive(Debug)]
pub(super) enum Job {
    Gather(Gathering),
    ReduceRuns(RunReduction),
    Reduce(ListReduction),
}

impl Job {
    /// Packs what this member hands in; `transfers` is how often sums travel at most.
    pub(super) fn new(site: &Site, work: Work, transfers: Transfers) -> Result<Self> {
        match work {
            Work::Gather { own, layout, device } => {
                Ok(Self::Gather(Gathering::new(site, &own, layout, device)?))
            }
            Work::Reduce { list, wanted: Wanted::ByRank(runs), reduction } => {
                Ok(Self::ReduceRuns(RunReduction::new(site, &list, &runs, reduction)?))
            }
            Work::Reduce { list, wanted: Wanted::Everything, reduction } => {
                let all = (0..list.len()).collect();
                Ok(Self::Reduce(ListReduction::new(site, &list, all, (reduction, transfers))?))
            }
            Work::Reduce { list, wanted: Wanted::Own(wanted), reduction } => {
                Ok(Self::Reduce(ListReduction::new(site, &list, wanted, (reduction, transfers))?))
            }
        }
    }

    /// Starts its transfers, once all members are known to have come to it.
    pub(super) fn start(&mut self, call: &Call<'_>) -> Result<()> {
        match self {
            Self::Gather(Gathering { swaps, .. })
            | Self::ReduceRuns(RunReduction { swaps, .. }) => {
                for swap in swaps.values_mut() {
                    swap.start(call);
                }
                Ok(())
            }
            Self::Reduce(job) => job.buckets.iter_mut().try_for_each(|(_, sum)| sum.start(call)),
        }
    }

    /// Its result, once it has been started.
    pub(super) fn finish(self) -> Result<Vec<Tensor>> {
        match self {
            Self::Gather(job) => job.finish(),
            Self::ReduceRuns(job) => job.finish(),
            Self::Reduce(job) => job.finish(),
        }
    }
}

/// For each type, by its name and so in the same order on all ranks, what is swapped.
type ByType = BTreeMap<&'static str, Swap>;

#[derive(Debug)]
pub(super) struct Gathering {
    layout: RunLayout,
    device: Device,
    swaps: ByType,
}

impl Gathering {
    fn new(site: &Site, own: &[Tensor], layout: RunLayout, device: Device) -> Result<Self> {
        let by_rank = layout.by_rank();
        let dtype_of = |run: &Run| layout.tensors()[run.tensor].1;
        let mut swaps = ByType::new();
        for dtype in types(layout.tensors().iter().map(|(_, dtype)| *dtype)) {
            let of_type =
                |rank: usize| by_rank[rank].iter().filter(move |run| dtype_of(run) == dtype);
            let n_items = |rank| of_type(rank).map(|run| run.items.len()).sum();
            let own_runs = by_rank[site.rank].iter().zip(own);
            let own: Vec<Tensor> = own_runs
                .filter(|(run, _)| dtype_of(run) == dtype)
                .map(|(_, x)| flat(x))
                .collect::<Result<_>>()?;
            let source = concat_flat(&own, dtype, &device)?;
            let own_items = source.elem_count();
            swaps.insert(dtype.as_str(), Swap::new(site, source, |_| 0..own_items, n_items)?);
        }
        Ok(Self { layout, device, swaps })
    }

    fn finish(self) -> Result<Vec<Tensor>> {
        let Self { layout, device, swaps } = self;
        let by_rank = layout.by_rank();
        // For each rank its runs, by their numbers.
        let mut arrived: Vec<BTreeMap<usize, Tensor>> = vec![BTreeMap::new(); by_rank.len()];
        for (dtype, swap) in swaps {
            for (rank, items) in swap.wait()?.iter().enumerate() {
                let mut start = 0;
                for (n, run) in by_rank[rank].iter().enumerate() {
                    if layout.tensors()[run.tensor].1.as_str() == dtype {
                        arrived[rank].insert(n, items.narrow(0, start, run.items.len())?);
                        start += run.items.len();
                    }
                }
            }
        }
        let whole = |((shape, dtype), owners): (&(Shape, DType), &Vec<Owned>)| {
            let part = |owned: &Owned| (owned.items.start, &arrived[owned.rank][&owned.n_th]);
            filled(shape, *dtype, &device, owners.iter().map(part)).map(Var::into_inner)
        };
        layout.tensors().iter().zip(layout.owners()).map(whole).collect()
    }
}

/// A reduction of which each rank gets its runs alone.
#[derive(Debug)]
pub(super) struct RunReduction {
    /// The runs of this rank, with their types.
    own: Vec<(Run, DType)>,
    swaps: ByType,
    reduction: Reduction,
}

impl RunReduction {
    fn new(site: &Site, list: &[Tensor], runs: &[Vec<Run>], reduction: Reduction) -> Result<Self> {
        let list: Vec<Tensor> = list.iter().map(flat).collect::<Result<_>>()?;
        let mut swaps = ByType::new();
        for dtype in types(runs.iter().flatten().map(|run| list[run.tensor].dtype())) {
            let mut parts = Vec::new();
            let mut places: Vec<Range<usize>> = Vec::new();
            let mut end = 0;
            for of_rank in runs {
                let start = end;
                for Run { tensor, items } in of_rank {
                    if list[*tensor].dtype() == dtype {
                        parts.push(list[*tensor].narrow(0, items.start, items.len())?);
                        end += items.len();
                    }
                }
                places.push(start..end);
            }
            let own_items = places[site.rank].len();
            let source = concat_flat(&parts, dtype, list[0].device())?;
            let swap = Swap::new(site, source, |to| places[to].clone(), |_| own_items)?;
            swaps.insert(dtype.as_str(), swap);
        }
        let own = runs[site.rank].iter().map(|run| (run.clone(), list[run.tensor].dtype()));
        Ok(Self { own: own.collect(), swaps, reduction })
    }

    fn finish(self) -> Result<Vec<Tensor>> {
        let mut sums = BTreeMap::new();
        for (dtype, swap) in self.swaps {
            let sum = reduced(&swap, self.reduction)?;
            let mut start = 0;
            for (n, (run, _)) in
                self.own.iter().enumerate().filter(|(_, own)| own.1.as_str() == dtype)
            {
                sums.insert(n, sum.narrow(0, start, run.items.len())?);
                start += run.items.len();
            }
        }
        // By the numbers of the runs.
        Ok(sums.into_values().collect())
    }
}

/// A reduction that every rank makes for everybody: each process has one device, and it is rare that
/// some of them want less.
#[derive(Debug)]
pub(super) struct ListReduction {
    shapes: Vec<Shape>,
    /// Which of the tensors this rank wants.
    wanted: Vec<usize>,
    /// The numbers of tensors that are reduced together.
    buckets: Vec<(Vec<usize>, Sum)>,
}

impl ListReduction {
    fn new(
        site: &Site,
        list: &[Tensor],
        wanted: Vec<usize>,
        (reduction, transfers): (Reduction, Transfers),
    ) -> Result<Self> {
        let sum = |bucket: Vec<usize>| {
            let sum = Sum::new(site, joined(list, &bucket)?, reduction, transfers)?;
            Ok((bucket, sum))
        };
        Ok(Self {
            shapes: list.iter().map(|x| x.shape().clone()).collect(),
            wanted,
            buckets: buckets(list).into_iter().map(sum).collect::<Result<_>>()?,
        })
    }

    fn finish(self) -> Result<Vec<Tensor>> {
        let mut sums = BTreeMap::new();
        for (bucket, sum) in self.buckets {
            sums.extend(cut(&self.shapes, &bucket, &sum.finish()?)?);
        }
        let sum = |n: &usize| match sums.get(n) {
            Some(sum) => Ok(sum.clone()),
            None => bail!("there is no tensor {n} to sum"),
        };
        self.wanted.iter().map(sum).collect()
    }
}

/// How often sums travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transfers {
    /// Every member gets all summands and adds them up itself.
    One,
    /// Of a large tensor every member adds up a part, and the parts travel again.
    ///
    /// Not of what was started: its second transfer waits for the device to have added up, in the
    /// stream of what the replica computes, into which the replica may by then have put a
    /// collective that it called. Where another member waits for the sum before it calls that
    /// collective, each of the two would wait for the other for ever.
    Two,
}

/// The reduction of one tensor of one dimension, for all members.
#[derive(Debug)]
pub(super) struct Sum {
    n_items: usize,
    /// Whether each member makes a part, which then travels.
    is_in_parts: bool,
    /// Of what is reduced; then of its parts.
    swap: Swap,
    reduction: Reduction,
}

impl Sum {
    pub(super) fn new(
        site: &Site,
        x: Tensor,
        reduction: Reduction,
        transfers: Transfers,
    ) -> Result<Self> {
        let n_items = x.elem_count();
        let is_large = n_items * x.dtype().size_in_bytes() > SMALL_BYTES;
        let is_in_parts = is_large && transfers == Transfers::Two;
        let part =
            |rank| if is_in_parts { balanced(n_items, rank, site.size()) } else { 0..n_items };
        let own_items = part(site.rank).len();
        Ok(Self { n_items, is_in_parts, swap: Swap::new(site, x, part, |_| own_items)?, reduction })
    }

    /// Starts its last transfer.
    pub(super) fn start(&mut self, call: &Call<'_>) -> Result<()> {
        self.swap.start(call);
        if !self.is_in_parts {
            return Ok(());
        }
        let sum = reduced(&self.swap, self.reduction)?;
        let part = |rank| balanced(self.n_items, rank, call.site.size());
        let own_items = sum.elem_count();
        self.swap = Swap::new(call.site, sum, |_| 0..own_items, |from| part(from).len())?;
        self.swap.start(call);
        Ok(())
    }

    pub(super) fn finish(self) -> Result<Tensor> {
        if self.is_in_parts {
            Tensor::cat(&self.swap.wait()?, 0)
        } else {
            reduced(&self.swap, self.reduction)
        }
    }
}

/// The numbers of tensors of one type, in order, cut into buckets; the same for all lists of the
/// same shapes.
fn buckets(list: &[Tensor]) -> Vec<Vec<usize>> {
    let mut of_types: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (n, x) in list.iter().enumerate() {
        of_types.entry(x.dtype().as_str()).or_default().push(n);
    }
    of_types.values().flat_map(|of_type| buckets_of(list, of_type)).collect()
}

fn buckets_of(list: &[Tensor], of_type: &[usize]) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let mut room = 0;
    for &n in of_type {
        let bytes = list[n].elem_count() * list[n].dtype().size_in_bytes();
        if let Some(bucket) = buckets.last_mut().filter(|_| bytes <= room) {
            bucket.push(n);
        } else {
            buckets.push(vec![n]);
            room = BUCKET_BYTES;
        }
        room = room.saturating_sub(bytes);
    }
    buckets
}

/// The reduction of what has been swapped.
fn reduced(swap: &Swap, reduction: Reduction) -> Result<Tensor> {
    let summands = swap.wait()?;
    match &summands[0] {
        // There are no kernels for no items.
        nothing if nothing.elem_count() == 0 => Ok(nothing.clone()),
        _ => elementwise::reduced(&summands, reduction),
    }
}

/// Each type once, in the same order on all ranks.
fn types(dtypes: impl Iterator<Item = DType>) -> Vec<DType> {
    let named: BTreeMap<&str, DType> = dtypes.map(|dtype| (dtype.as_str(), dtype)).collect();
    named.into_values().collect()
}

/// Tensors of one dimension and in one piece as one, which may be the only one of them.
pub(super) fn concat_flat(parts: &[Tensor], dtype: DType, device: &Device) -> Result<Tensor> {
    let parts: Vec<&Tensor> = parts.iter().filter(|part| part.elem_count() > 0).collect();
    match parts[..] {
        [] => nothing(dtype, device),
        [only] => Ok(only.clone()),
        _ => Tensor::cat(&parts, 0),
    }
}

/// The tensors of a bucket end to end.
fn joined(list: &[Tensor], bucket: &[usize]) -> Result<Tensor> {
    let parts: Vec<Tensor> = bucket.iter().map(|&n| flat(&list[n])).collect::<Result<_>>()?;
    let first = &list[bucket[0]];
    concat_flat(&parts, first.dtype(), first.device())
}

/// What [`joined`] made of a bucket, as tensors of their shapes, with their numbers.
fn cut(shapes: &[Shape], bucket: &[usize], joined: &Tensor) -> Result<Vec<(usize, Tensor)>> {
    let mut start = 0;
    let part = |&n: &usize| {
        let shape = &shapes[n];
        let part = joined.narrow(0, start, shape.elem_count())?.reshape(shape)?;
        start += shape.elem_count();
        Ok((n, part))
    };
    bucket.iter().map(part).collect()
}

/// The items of a tensor in one dimension and in one piece.
pub(super) fn flat(x: &Tensor) -> Result<Tensor> {
    match x.elem_count() {
        0 => nothing(x.dtype(), x.device()),
        _ => x.contiguous()?.flatten_all(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_cut_into_what_it_was_joined_of() {
        let list: Vec<Tensor> =
            (0..4).map(|n| Tensor::full(n as f32, (n, 2), &Device::Cpu).unwrap()).collect();
        let joined = joined(&list, &[1, 0, 3]).unwrap();
        assert_eq!(joined.dims(), [8]);
        let shapes: Vec<Shape> = list.iter().map(|x| x.shape().clone()).collect();
        for (n, part) in cut(&shapes, &[1, 0, 3], &joined).unwrap() {
            assert_eq!(part.to_vec2::<f32>().unwrap(), list[n].to_vec2::<f32>().unwrap());
        }
    }

    #[test]
    fn a_bucket_holds_tensors_of_one_type_that_have_room_in_order() {
        let zeros = |items, dtype| Tensor::zeros(items, dtype, &Device::Cpu).unwrap();
        let large = zeros(BUCKET_BYTES / 4 - 1, DType::F32);
        let small = zeros(1, DType::F32);
        let other = zeros(1, DType::F64);
        let list =
            [small.clone(), large.clone(), other.clone(), small.clone(), large, small, other];
        assert_eq!(buckets(&list), [vec![0, 1], vec![3, 4], vec![5], vec![2, 6]]);
        assert!(buckets(&[]).is_empty());
    }
}
