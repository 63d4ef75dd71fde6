//! Collectives on lists of tensors: packing of arguments, and unpacking of received items.
//!
//! The replica's thread packs the arguments, so that the device packs them before it runs later
//! computations. Another thread may then start the transfers.

use std::{collections::BTreeMap, ops::Range};

use candle_core::{DType, Device, Result, Tensor};

use super::exchange::{ItemExchange, NcclCall, empty_tensor};
use crate::{
    device::to_device::leaf_from_parts,
    engine::{
        GroupContext, ListRequest,
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

/// A packed collective on lists. It makes a single transfer of each dtype.
///
/// A started collective must not make a second transfer after it has added items, because it could
/// deadlock. The second transfer would wait on the replica's stream for the addition. By then the
/// replica may have queued a called collective on that stream. If another member waits for the sum
/// before it calls that collective, the two members wait for each other.
#[derive(Debug)]
pub(super) enum NcclListOp {
    Gather(LayoutGather),
    Sum(RunSum),
}

impl NcclListOp {
    /// Packs the arguments of this member.
    pub(super) fn new(ctx: &GroupContext, work: ListRequest) -> Result<Self> {
        match work {
            ListRequest::Gather { own, layout, device } => {
                Ok(Self::Gather(LayoutGather::new(ctx, &own, layout, device)?))
            }
            ListRequest::Sum { list, runs_by_rank } => {
                Ok(Self::Sum(RunSum::new(ctx, &list, &runs_by_rank)?))
            }
        }
    }

    /// Starts the transfers, after the headers of all members have agreed.
    pub(super) fn start(&mut self, call: &NcclCall<'_>) {
        let (Self::Gather(LayoutGather { exchanges, .. }) | Self::Sum(RunSum { exchanges, .. })) =
            self;
        for exchange in exchanges.values_mut() {
            exchange.start(call);
        }
    }

    /// Returns the results. Called after `start`.
    pub(super) fn finish(self) -> Result<Vec<Tensor>> {
        match self {
            Self::Gather(list_op) => list_op.finish(),
            Self::Sum(list_op) => list_op.finish(),
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

/// A sum of lists in which each rank gets only the sums of its runs.
#[derive(Debug)]
pub(super) struct RunSum {
    /// The runs of this rank, with their dtypes.
    own: Vec<(Run, DType)>,
    exchanges: ByDtype,
}

impl RunSum {
    fn new(ctx: &GroupContext, list: &[Tensor], runs: &[Vec<Run>]) -> Result<Self> {
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
        Ok(Self { own: own.collect(), exchanges })
    }

    fn finish(self) -> Result<Vec<Tensor>> {
        let mut sums = BTreeMap::new();
        for (dtype, exchange) in self.exchanges {
            let sum = reduce_received(&exchange, Reduction::Sum)?;
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

/// Returns the reductions of all tensors of a list, after the headers of all members have agreed.
pub(super) fn reduce_list(
    call: &NcclCall<'_>,
    list: &[Tensor],
    reduction: Reduction,
) -> Result<Vec<Tensor>> {
    let mut sums = BTreeMap::new();
    for bucket in buckets(list) {
        let sum = reduce_flat(call, concat_bucket(list, &bucket)?, reduction)?;
        sums.extend(split_bucket(list, &bucket, &sum)?);
    }
    // The map is ordered by the index of the tensor.
    Ok(sums.into_values().collect())
}

/// Returns the reduction of one flat tensor. Every member reduces a small tensor. Of a large one,
/// every member reduces a part, and then the members exchange the reduced parts in a second
/// transfer.
fn reduce_flat(call: &NcclCall<'_>, x: Tensor, reduction: Reduction) -> Result<Tensor> {
    let (n_items, size) = (x.elem_count(), call.ctx.size());
    let is_in_parts = n_items * x.dtype().size_in_bytes() > SMALL_BYTES;
    let part = |rank| if is_in_parts { balanced(n_items, rank, size) } else { 0..n_items };
    let own_items = part(call.ctx.rank).len();
    let mut exchange = ItemExchange::new(call.ctx, x, part, |_| own_items)?;
    exchange.start(call);
    let sum = reduce_received(&exchange, reduction)?;
    if !is_in_parts {
        return Ok(sum);
    }
    Tensor::cat(&call.exchange_items(sum, |_| 0..own_items, |from| part(from).len())?, 0)
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
/// its shape there.
fn split_bucket(
    list: &[Tensor],
    bucket: &[usize],
    joined: &Tensor,
) -> Result<Vec<(usize, Tensor)>> {
    let mut start = 0;
    let mut parts = Vec::with_capacity(bucket.len());
    for &n in bucket {
        let shape = list[n].shape();
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
        for (n, part) in split_bucket(&list, &[1, 0, 3], &joined).unwrap() {
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
