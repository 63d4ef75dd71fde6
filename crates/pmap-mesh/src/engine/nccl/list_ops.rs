//! Collectives on lists of tensors: packing of arguments, and unpacking of received items.
//!
//! The replica's thread packs the arguments, so that the device packs them before it runs later
//! computations. Another thread may then start the transfers.

use std::{collections::BTreeMap, ops::Range};

use candle_core::{DType, Device, Result, Shape, Tensor, bail};

use super::exchange::{ItemExchange, NcclCall, empty_tensor};
use crate::{
    device::to_device::leaf_from_parts,
    engine::{
        GroupContext, ListRequest, WantedTensors,
        layout::{Run, RunLayout},
    },
    reduce::{Reduction, elementwise, parts::balanced},
};

/// The size, in bytes, up to which every member reduces a complete tensor. For small tensors, a
/// second transfer would take longer than the complete reduction.
const SMALL_BYTES: usize = 64 << 10;

/// The largest bucket of small tensors, in bytes. A fast link transfers it in some milliseconds,
/// and starting a transfer takes far less. Larger buckets would only take more memory.
const BUCKET_BYTES: usize = 64 << 20;

/// A packed collective on lists.
#[derive(Debug)]
pub(super) enum NcclListOp {
    Gather(LayoutGather),
    ReduceRuns(RunReduction),
    Reduce(ListReduction),
}

impl NcclListOp {
    /// Packs the arguments of this member. `by` is for reductions of complete lists.
    pub(super) fn new(ctx: &GroupContext, work: ListRequest, by: ReduceBy) -> Result<Self> {
        match work {
            ListRequest::Gather { own, layout, device } => {
                Ok(Self::Gather(LayoutGather::new(ctx, &own, layout, device)?))
            }
            ListRequest::Reduce { list, wanted: WantedTensors::ByRank(runs), reduction } => {
                Ok(Self::ReduceRuns(RunReduction::new(ctx, &list, &runs, reduction)?))
            }
            ListRequest::Reduce { list, wanted: WantedTensors::Everything, reduction } => {
                let all = (0..list.len()).collect();
                Ok(Self::Reduce(ListReduction::new(ctx, &list, all, (reduction, by))?))
            }
            ListRequest::Reduce { list, wanted: WantedTensors::Own(wanted), reduction } => {
                Ok(Self::Reduce(ListReduction::new(ctx, &list, wanted, (reduction, by))?))
            }
        }
    }

    /// Starts the transfers, after the headers of all members have agreed.
    pub(super) fn start(&mut self, call: &NcclCall<'_>) -> Result<()> {
        match self {
            Self::Gather(LayoutGather { exchanges, .. })
            | Self::ReduceRuns(RunReduction { exchanges, .. }) => {
                for exchange in exchanges.values_mut() {
                    exchange.start(call);
                }
                Ok(())
            }
            Self::Reduce(list_op) => {
                list_op.buckets.iter_mut().try_for_each(|(_, sum)| sum.start(call))
            }
        }
    }

    /// Returns the results. Called after `start`.
    pub(super) fn finish(self) -> Result<Vec<Tensor>> {
        match self {
            Self::Gather(list_op) => list_op.finish(),
            Self::ReduceRuns(list_op) => list_op.finish(),
            Self::Reduce(list_op) => list_op.finish(),
        }
    }
}

/// The exchange of the items of each dtype. The key is the dtype's name, so that all ranks iterate
/// in the same order.
type ByDtype = BTreeMap<&'static str, ItemExchange>;

/// A gather of the tensors of a layout.
#[derive(Debug)]
pub(super) struct LayoutGather {
    layout: RunLayout,
    device: Device,
    exchanges: ByDtype,
}

impl LayoutGather {
    fn new(ctx: &GroupContext, own: &[Tensor], layout: RunLayout, device: Device) -> Result<Self> {
        let by_rank = layout.by_rank();
        let dtype_of = |run: &Run| layout.tensors()[run.tensor].1;
        let mut exchanges = ByDtype::new();
        for dtype in distinct_dtypes(layout.tensors().iter().map(|(_, dtype)| *dtype)) {
            let own_runs = by_rank[ctx.rank].iter().zip(own);
            let own_parts: Vec<Tensor> = own_runs
                .filter(|(run, _)| dtype_of(run) == dtype)
                .map(|(_, x)| flat(x))
                .collect::<Result<_>>()?;
            let source = concat_flat(&own_parts, dtype, &device)?;
            let own_items = source.elem_count();
            exchanges.insert(
                dtype.as_str(),
                ItemExchange::new(
                    ctx,
                    source,
                    |_| 0..own_items,
                    |rank: usize| {
                        let runs = by_rank[rank].iter().filter(|run| dtype_of(run) == dtype);
                        runs.map(|run| run.items.len()).sum()
                    },
                )?,
            );
        }
        Ok(Self { layout, device, exchanges })
    }

    fn finish(self) -> Result<Vec<Tensor>> {
        let Self { layout, device, exchanges } = self;
        let by_rank = layout.by_rank();
        // The received runs of each rank, by index.
        let mut arrived: Vec<BTreeMap<usize, Tensor>> = vec![BTreeMap::new(); by_rank.len()];
        for (dtype, exchange) in exchanges {
            for (rank, items) in exchange.results()?.iter().enumerate() {
                let mut start = 0;
                for (n, run) in by_rank[rank].iter().enumerate() {
                    if layout.tensors()[run.tensor].1.as_str() == dtype {
                        arrived[rank].insert(n, items.narrow(0, start, run.items.len())?);
                        start += run.items.len();
                    }
                }
            }
        }
        let mut leaves = Vec::with_capacity(layout.tensors().len());
        for ((shape, dtype), owners) in layout.tensors().iter().zip(layout.by_tensor()) {
            let leaf = leaf_from_parts(
                shape,
                *dtype,
                &device,
                owners.iter().map(|owned| (owned.items.start, &arrived[owned.rank][&owned.index])),
            )?;
            leaves.push(leaf.into_inner());
        }
        Ok(leaves)
    }
}

/// A reduction in which each rank gets only the reductions of its runs.
#[derive(Debug)]
pub(super) struct RunReduction {
    /// The runs of this rank, with their dtypes.
    own: Vec<(Run, DType)>,
    exchanges: ByDtype,
    reduction: Reduction,
}

impl RunReduction {
    fn new(
        ctx: &GroupContext,
        list: &[Tensor],
        runs: &[Vec<Run>],
        reduction: Reduction,
    ) -> Result<Self> {
        let list: Vec<Tensor> = list.iter().map(flat).collect::<Result<_>>()?;
        let mut exchanges = ByDtype::new();
        for dtype in distinct_dtypes(runs.iter().flatten().map(|run| list[run.tensor].dtype())) {
            let mut parts = Vec::new();
            let mut places: Vec<Range<usize>> = Vec::new();
            let mut end = 0;
            for rank_runs in runs {
                let start = end;
                for Run { tensor, items } in rank_runs {
                    if list[*tensor].dtype() == dtype {
                        parts.push(list[*tensor].narrow(0, items.start, items.len())?);
                        end += items.len();
                    }
                }
                places.push(start..end);
            }
            let own_items = places[ctx.rank].len();
            let source = concat_flat(&parts, dtype, list[0].device())?;
            let exchange = ItemExchange::new(ctx, source, |to| places[to].clone(), |_| own_items)?;
            exchanges.insert(dtype.as_str(), exchange);
        }
        let own = runs[ctx.rank].iter().map(|run| (run.clone(), list[run.tensor].dtype()));
        Ok(Self { own: own.collect(), exchanges, reduction })
    }

    fn finish(self) -> Result<Vec<Tensor>> {
        let mut sums = BTreeMap::new();
        for (dtype, exchange) in self.exchanges {
            let sum = reduce_received(&exchange, self.reduction)?;
            let mut start = 0;
            for (n, (run, run_dtype)) in self.own.iter().enumerate() {
                if run_dtype.as_str() == dtype {
                    sums.insert(n, sum.narrow(0, start, run.items.len())?);
                    start += run.items.len();
                }
            }
        }
        // The map is ordered by the index of the run.
        Ok(sums.into_values().collect())
    }
}

/// A reduction of a complete list on every rank. A rank that wants only some of the tensors drops
/// the others; this is rare, because each process has one device.
#[derive(Debug)]
pub(super) struct ListReduction {
    shapes: Vec<Shape>,
    /// The indexes of the tensors that this rank wants.
    wanted: Vec<usize>,
    /// The indexes of the tensors that are reduced together, with their reduction.
    buckets: Vec<(Vec<usize>, TensorReduction)>,
}

impl ListReduction {
    fn new(
        ctx: &GroupContext,
        list: &[Tensor],
        wanted: Vec<usize>,
        (reduction, by): (Reduction, ReduceBy),
    ) -> Result<Self> {
        let shapes = list.iter().map(|x| x.shape().clone()).collect();
        let mut reductions = Vec::new();
        for bucket in buckets(list) {
            let x = concat_bucket(list, &bucket)?;
            reductions.push((bucket, TensorReduction::new(ctx, x, reduction, by)?));
        }
        Ok(Self { shapes, wanted, buckets: reductions })
    }

    fn finish(self) -> Result<Vec<Tensor>> {
        let mut sums = BTreeMap::new();
        for (bucket, sum) in self.buckets {
            sums.extend(split_bucket(&self.shapes, &bucket, &sum.finish()?)?);
        }
        let mut wanted = Vec::with_capacity(self.wanted.len());
        for n in &self.wanted {
            let Some(sum) = sums.get(n) else { bail!("there is no tensor {n} to sum") };
            wanted.push(sum.clone());
        }
        Ok(wanted)
    }
}

/// The members that reduce the items of a large tensor. Small tensors are reduced by every member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReduceBy {
    /// Every member receives all summands and reduces them, after a single transfer.
    EveryMember,
    /// Every member reduces a part, and then the members exchange the reduced parts in a second
    /// transfer.
    ///
    /// A started collective must not use two transfers, because it could deadlock. Its second
    /// transfer waits on the replica's stream for the addition. By then the replica may have queued
    /// a called collective on that stream. If another member waits for the sum before it calls that
    /// collective, the two members wait for each other.
    Parts,
}

/// The reduction of one flat tensor, for all members.
#[derive(Debug)]
pub(super) struct TensorReduction {
    n_items: usize,
    /// Whether each member reduces one part, so that a second transfer exchanges the reduced parts.
    is_in_parts: bool,
    /// The exchange of the summands. In a reduction in parts, `start` replaces it by the exchange
    /// of the reduced parts.
    exchange: ItemExchange,
    reduction: Reduction,
}

impl TensorReduction {
    pub(super) fn new(
        ctx: &GroupContext,
        x: Tensor,
        reduction: Reduction,
        by: ReduceBy,
    ) -> Result<Self> {
        let n_items = x.elem_count();
        let is_large = n_items * x.dtype().size_in_bytes() > SMALL_BYTES;
        let is_in_parts = is_large && by == ReduceBy::Parts;
        let part =
            |rank| if is_in_parts { balanced(n_items, rank, ctx.size()) } else { 0..n_items };
        let own_items = part(ctx.rank).len();
        Ok(Self {
            n_items,
            is_in_parts,
            exchange: ItemExchange::new(ctx, x, part, |_| own_items)?,
            reduction,
        })
    }

    /// Starts the transfer. In a reduction in parts, also reduces this member's part, and starts
    /// the second transfer.
    pub(super) fn start(&mut self, call: &NcclCall<'_>) -> Result<()> {
        self.exchange.start(call);
        if !self.is_in_parts {
            return Ok(());
        }
        let sum = reduce_received(&self.exchange, self.reduction)?;
        let n_items = self.n_items;
        let size = call.ctx.size();
        let own_items = sum.elem_count();
        self.exchange = ItemExchange::new(
            call.ctx,
            sum,
            |_| 0..own_items,
            |from| balanced(n_items, from, size).len(),
        )?;
        self.exchange.start(call);
        Ok(())
    }

    pub(super) fn finish(self) -> Result<Tensor> {
        if self.is_in_parts {
            Tensor::cat(&self.exchange.results()?, 0)
        } else {
            reduce_received(&self.exchange, self.reduction)
        }
    }
}

/// Groups the indexes of a list's tensors into buckets of one dtype. Lists of the same dtypes and
/// shapes have the same buckets.
fn buckets(list: &[Tensor]) -> Vec<Vec<usize>> {
    let mut by_dtype: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (n, x) in list.iter().enumerate() {
        by_dtype.entry(x.dtype().as_str()).or_default().push(n);
    }
    by_dtype.values().flat_map(|indexes| split_into_buckets(list, indexes)).collect()
}

fn split_into_buckets(list: &[Tensor], indexes: &[usize]) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let mut free_bytes = 0;
    for &n in indexes {
        let bytes = list[n].elem_count() * list[n].dtype().size_in_bytes();
        if let Some(bucket) = buckets.last_mut()
            && bytes <= free_bytes
        {
            bucket.push(n);
        } else {
            buckets.push(vec![n]);
            free_bytes = BUCKET_BYTES;
        }
        free_bytes = free_bytes.saturating_sub(bytes);
    }
    buckets
}

/// Reduces the summands that an exchange has received.
fn reduce_received(exchange: &ItemExchange, reduction: Reduction) -> Result<Tensor> {
    let summands = exchange.results()?;
    match &summands[0] {
        // There are no kernels for empty tensors.
        empty if empty.elem_count() == 0 => Ok(empty.clone()),
        _ => elementwise::reduce(&summands, reduction),
    }
}

/// Returns each dtype once, in the same order on all ranks.
fn distinct_dtypes(dtypes: impl Iterator<Item = DType>) -> Vec<DType> {
    let named: BTreeMap<&str, DType> = dtypes.map(|dtype| (dtype.as_str(), dtype)).collect();
    named.into_values().collect()
}

/// Concatenates flat contiguous tensors. A tensor that is the only one with items is returned
/// unchanged.
pub(super) fn concat_flat(parts: &[Tensor], dtype: DType, device: &Device) -> Result<Tensor> {
    let non_empty: Vec<&Tensor> = parts.iter().filter(|part| part.elem_count() > 0).collect();
    match non_empty[..] {
        [] => empty_tensor(dtype, device),
        [only] => Ok(only.clone()),
        _ => Tensor::cat(&non_empty, 0),
    }
}

/// Concatenates the tensors of a bucket.
fn concat_bucket(list: &[Tensor], bucket: &[usize]) -> Result<Tensor> {
    let parts: Vec<Tensor> = bucket.iter().map(|&n| flat(&list[n])).collect::<Result<_>>()?;
    let first = &list[bucket[0]];
    concat_flat(&parts, first.dtype(), first.device())
}

/// Splits the concatenated tensors of a bucket. Returns each tensor with its index in the list, in
/// its shape from `shapes`.
fn split_bucket(
    shapes: &[Shape],
    bucket: &[usize],
    joined: &Tensor,
) -> Result<Vec<(usize, Tensor)>> {
    let mut start = 0;
    let mut parts = Vec::with_capacity(bucket.len());
    for &n in bucket {
        let shape = &shapes[n];
        parts.push((n, joined.narrow(0, start, shape.elem_count())?.reshape(shape)?));
        start += shape.elem_count();
    }
    Ok(parts)
}

/// Returns the items of a tensor as a flat contiguous tensor.
pub(super) fn flat(x: &Tensor) -> Result<Tensor> {
    match x.elem_count() {
        0 => empty_tensor(x.dtype(), x.device()),
        _ => x.contiguous()?.flatten_all(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_bucket_restores_tensors() {
        let list: Vec<Tensor> =
            (0..4).map(|n| Tensor::full(n as f32, (n, 2), &Device::Cpu).unwrap()).collect();
        let joined = concat_bucket(&list, &[1, 0, 3]).unwrap();
        assert_eq!(joined.dims(), [8]);
        let shapes: Vec<Shape> = list.iter().map(|x| x.shape().clone()).collect();
        for (n, part) in split_bucket(&shapes, &[1, 0, 3], &joined).unwrap() {
            assert_eq!(part.to_vec2::<f32>().unwrap(), list[n].to_vec2::<f32>().unwrap());
        }
    }

    #[test]
    fn buckets_hold_one_dtype_in_order() {
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
