//! Lists of tensors that are moved or summed at once: what of them goes together.

use std::{collections::BTreeMap, ops::Range};

use candle_core::{DType, Device, Result, Shape, Tensor, Var};

use super::{Call, flat};
use crate::{
    engine::layout::{Owned, Run, RunLayout},
    mesh::place::{copied, filled, in_one_piece},
    reduce::{Reduction, elementwise},
};

/// How many bytes of small tensors are put together: some milliseconds of a fast link, beside which
/// the start of a transfer does not count; more would only take memory.
const BUCKET_BYTES: usize = 64 << 20;

/// The numbers of tensors of one type, in order, cut into buckets; the same for all lists of the
/// same shapes.
pub(super) fn buckets(list: &[Tensor]) -> Vec<Vec<usize>> {
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

impl Call<'_> {
    /// The tensors of a layout, of which this rank has `own` runs.
    pub(super) fn gather_runs(
        &self,
        own: &[Tensor],
        layout: &RunLayout,
        device: &Device,
    ) -> Result<Vec<Var>> {
        let by_rank = layout.by_rank();
        // For each rank its runs, by their numbers.
        let mut arrived: Vec<BTreeMap<usize, Tensor>> = vec![BTreeMap::new(); by_rank.len()];
        for dtype in types(layout.tensors().iter().map(|(_, dtype)| *dtype)) {
            let of_type = |rank: usize| {
                let runs = by_rank[rank].iter().enumerate();
                runs.filter(move |(_, run)| layout.tensors()[run.tensor].1 == dtype)
            };
            let own: Vec<Tensor> =
                of_type(self.site.rank).map(|(n, _)| flat(&own[n])).collect::<Result<_>>()?;
            let source = end_to_end(&own, dtype, device)?;
            let n_items = |rank| of_type(rank).map(|(_, run)| run.items.len()).sum();
            let all = self.swap(&source, |_| 0..source.elem_count(), n_items)?;
            for (rank, items) in all.iter().enumerate() {
                let mut start = 0;
                for (n, run) in of_type(rank) {
                    arrived[rank].insert(n, items.narrow(0, start, run.items.len())?);
                    start += run.items.len();
                }
            }
        }
        let whole = |((shape, dtype), owners): (&(Shape, DType), &Vec<Owned>)| {
            let part = |owned: &Owned| (owned.items.start, &arrived[owned.rank][&owned.n_th]);
            filled(shape, *dtype, device, owners.iter().map(part))
        };
        layout.tensors().iter().zip(layout.owners()).map(whole).collect()
    }

    /// The reductions of this rank's runs of a list, in their order; each run goes to its rank
    /// alone.
    pub(super) fn reduce_runs(
        &self,
        list: &[Tensor],
        runs: &[Vec<Run>],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        let list: Vec<Tensor> = list.iter().map(flat).collect::<Result<_>>()?;
        let mut sums = BTreeMap::new();
        for dtype in types(runs.iter().flatten().map(|run| list[run.tensor].dtype())) {
            let of_type = |rank: usize| {
                let runs = runs[rank].iter().enumerate();
                runs.filter(|(_, run)| list[run.tensor].dtype() == dtype)
            };
            let mut parts = Vec::new();
            let mut places: Vec<Range<usize>> = Vec::new();
            let mut end = 0;
            for rank in 0..runs.len() {
                let start = end;
                for (_, Run { tensor, items }) in of_type(rank) {
                    parts.push(list[*tensor].narrow(0, items.start, items.len())?);
                    end += items.len();
                }
                places.push(start..end);
            }
            let own_items = places[self.site.rank].len();
            let source = end_to_end(&parts, dtype, &self.engine.device)?;
            let summands = self.swap(&source, |to| places[to].clone(), |_| own_items)?;
            let sum = elementwise::reduced(&summands, reduction)?;
            let mut start = 0;
            for (n, run) in of_type(self.site.rank) {
                sums.insert(n, sum.narrow(0, start, run.items.len())?);
                start += run.items.len();
            }
        }
        // By the numbers of the runs.
        Ok(sums.into_values().collect())
    }
}

/// Each type once, in the same order on all ranks.
fn types(dtypes: impl Iterator<Item = DType>) -> Vec<DType> {
    let named: BTreeMap<&str, DType> = dtypes.map(|dtype| (dtype.as_str(), dtype)).collect();
    named.into_values().collect()
}

/// Tensors of one dimension as one, which is never a view of what was given.
fn end_to_end(parts: &[Tensor], dtype: DType, device: &Device) -> Result<Tensor> {
    match parts {
        [] => Tensor::zeros(0, dtype, device),
        [only] => copied(only),
        parts => Tensor::cat(parts, 0),
    }
}

/// The tensors of a bucket end to end.
pub(super) fn joined(list: &[Tensor], bucket: &[usize]) -> Result<Tensor> {
    let parts: Vec<Tensor> =
        bucket.iter().map(|&n| in_one_piece(&list[n])?.flatten_all()).collect::<Result<_>>()?;
    match <[Tensor; 1]>::try_from(parts) {
        Ok([only]) => Ok(only),
        Err(parts) => Tensor::cat(&parts, 0),
    }
}

/// What [`joined`] made of a bucket, as tensors of their shapes, with their numbers.
pub(super) fn cut(
    list: &[Tensor],
    bucket: &[usize],
    joined: &Tensor,
) -> Result<Vec<(usize, Tensor)>> {
    let mut start = 0;
    let part = |&n: &usize| {
        let x = &list[n];
        let part = joined.narrow(0, start, x.elem_count())?.reshape(x.shape())?;
        start += x.elem_count();
        Ok((n, part))
    };
    bucket.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn a_bucket_is_cut_into_what_it_was_joined_of() {
        let list: Vec<Tensor> =
            (0..4).map(|n| Tensor::full(n as f32, (n, 2), &Device::Cpu).unwrap()).collect();
        let joined = joined(&list, &[1, 0, 3]).unwrap();
        assert_eq!(joined.dims(), [8]);
        for (n, part) in cut(&list, &[1, 0, 3], &joined).unwrap() {
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
