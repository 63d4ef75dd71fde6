//! Lists of tensors that are reduced, each run of them for the rank that it belongs to.

use std::{collections::BTreeMap, ops::Range};

use bytemuck::cast_slice_mut;
use candle_core::{DType, Result, Tensor, bail};

use super::{
    bytes::{buffer, with_bytes},
    transfer::{Call, Kind},
};
use crate::{engine::layout::Run, reduce::Reduction};

/// Runs of one type, end to end.
pub(super) struct Joined<'a> {
    list: &'a [Tensor],
    runs: Vec<&'a Run>,
    item_bytes: usize,
}

impl<'a> Joined<'a> {
    fn new(list: &'a [Tensor], dtype: DType, runs: &'a [Run]) -> Self {
        let runs = runs.iter().filter(|run| list[run.tensor].dtype() == dtype).collect();
        Self { list, runs, item_bytes: dtype.size_in_bytes() }
    }

    pub(super) fn n_bytes(&self) -> usize {
        self.runs.iter().map(|run| run.items.len() * self.item_bytes).sum()
    }

    /// Copies these of its bytes; locks one tensor at a time.
    pub(super) fn copy(&self, part: Range<usize>, into: &mut [u8]) -> Result<()> {
        let mut start = 0;
        for Run { tensor, items } in &self.runs {
            let end = start + items.len() * self.item_bytes;
            let (first, last) = (part.start.max(start), part.end.min(end));
            if first < last {
                let shift = items.start * self.item_bytes;
                with_bytes(&self.list[*tensor], |bytes| {
                    let from = &bytes[shift + first - start..shift + last - start];
                    into[first - part.start..last - part.start].copy_from_slice(from);
                    Ok(())
                })?;
            }
            start = end;
        }
        Ok(())
    }
}

impl Call<'_> {
    /// What each rank wants of a list, by rank: the numbers of tensors, in their order.
    pub(super) fn exchange_wanted(
        &self,
        list: &[Tensor],
        wanted: &[usize],
    ) -> Result<Vec<Vec<usize>>> {
        let own = flags(list.len(), wanted)?;
        let of_all = self.exchange_bytes(list, &own)?;
        let set = |flags: &Vec<u8>| (0..flags.len()).filter(|&n| flags[n] != 0).collect();
        Ok(of_all.iter().map(set).collect())
    }

    /// The bytes of all ranks, of which each has as many.
    fn exchange_bytes(&self, list: &[Tensor], own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let received = self.exchange_headers(list, 0, own)?;
        let mut all = vec![own.to_vec(); self.site.size()];
        let mut late = Vec::new();
        for (rank, bytes) in all.iter_mut().enumerate().filter(|(rank, _)| *rank != self.site.rank)
        {
            if received.headers[rank].inline {
                bytes.copy_from_slice(received.inline(rank));
            } else {
                late.push((rank, Kind::Data, &mut bytes[..]));
            }
        }
        let sent = if received.headers[self.site.rank].inline { &[] } else { own };
        self.transfer(late, self.others().map(|to| (to, Kind::Data, sent)));
        Ok(all)
    }

    /// The reductions of the tensors that this rank wants, by their numbers in the list, given what
    /// each rank wants.
    pub(super) fn reduce_wanted(
        &self,
        list: &[Tensor],
        wanted: &[Vec<usize>],
        reduction: Reduction,
    ) -> Result<BTreeMap<usize, Tensor>> {
        let mut n_receivers = vec![0_usize; list.len()];
        wanted.iter().flatten().for_each(|&n| n_receivers[n] += 1);
        let own = &wanted[self.site.rank];
        let mut sums = BTreeMap::new();
        for (n, x) in list.iter().enumerate().filter(|(n, _)| n_receivers[*n] > 1) {
            let sum = self.reduce_tensor(x, reduction)?;
            if own.contains(&n) {
                sums.insert(n, sum);
            }
        }
        // What one rank alone wants goes straight to it.
        let alone = |wanted: &Vec<usize>| -> Vec<Run> {
            let alone = wanted.iter().filter(|&&n| n_receivers[n] == 1);
            alone.map(|&tensor| Run { tensor, items: 0..list[tensor].elem_count() }).collect()
        };
        let runs: Vec<Vec<Run>> = wanted.iter().map(alone).collect();
        let own_sums = self.reduce_runs(list, &runs, reduction)?;
        for (Run { tensor, .. }, sum) in runs[self.site.rank].iter().zip(own_sums) {
            sums.insert(*tensor, sum.reshape(list[*tensor].shape())?);
        }
        Ok(sums)
    }

    pub(super) fn reduce_tensor(&self, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let mut sum = buffer(x.dtype(), x.elem_count())?;
        with_bytes(x, |bytes| self.reduce(x.dtype(), bytes, sum.bytes_mut(), reduction))?;
        sum.tensor(x.dims())
    }

    /// The reductions of this rank's runs of a list, in their order; each run goes to its rank
    /// alone.
    pub(super) fn reduce_runs(
        &self,
        list: &[Tensor],
        runs: &[Vec<Run>],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        let own_rank = self.site.rank;
        let mut sums = BTreeMap::new();
        for dtype in types(list, runs) {
            let joined: Vec<Joined<'_>> =
                runs.iter().map(|of_rank| Joined::new(list, dtype, of_rank)).collect();
            let n_bytes = joined[own_rank].n_bytes();
            // Words, so that items of any type may lie in it.
            let mut words = vec![0_u64; n_bytes.div_ceil(size_of::<u64>())];
            let sum = &mut cast_slice_mut(&mut words)[..n_bytes];
            self.reduce_to_each(dtype, &joined, sum, reduction)?;
            let mut start = 0;
            let of_type = runs[own_rank].iter().enumerate();
            for (n, run) in of_type.filter(|(_, run)| list[run.tensor].dtype() == dtype) {
                let mut items = buffer(dtype, run.items.len())?;
                let end = start + items.bytes_mut().len();
                items.bytes_mut().copy_from_slice(&sum[start..end]);
                sums.insert(n, items.tensor(&[run.items.len()])?);
                start = end;
            }
        }
        // By the numbers of the runs.
        Ok(sums.into_values().collect())
    }
}

/// The types of the tensors that any rank gets runs of, in the same order on all.
fn types(list: &[Tensor], runs: &[Vec<Run>]) -> Vec<DType> {
    let named = runs.iter().flatten().map(|run| list[run.tensor].dtype());
    let types: BTreeMap<&str, DType> = named.map(|dtype| (dtype.as_str(), dtype)).collect();
    types.into_values().collect()
}

/// For each tensor of a list whether it is wanted: a byte each.
fn flags(len: usize, wanted: &[usize]) -> Result<Vec<u8>> {
    let mut flags = vec![0; len];
    for &n in wanted {
        match flags.get_mut(n) {
            Some(flag) => *flag = 1,
            None => bail!("there is no tensor {n} to sum"),
        }
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn runs_of_one_type_are_joined_and_read_at_any_place() {
        let list = [
            Tensor::arange(0_u8, 10, &Device::Cpu).unwrap(),
            Tensor::arange(0_i64, 4, &Device::Cpu).unwrap(),
            Tensor::arange(10_u8, 20, &Device::Cpu).unwrap(),
        ];
        let run = |tensor, items| Run { tensor, items };
        let runs = [run(0, 2..5), run(1, 0..4), run(2, 0..0), run(2, 7..10)];
        let joined = Joined::new(&list, DType::U8, &runs);
        assert_eq!(joined.n_bytes(), 6);
        let whole = [2, 3, 4, 17, 18, 19];
        for start in 0..=6 {
            for end in start..=6 {
                let mut part = vec![0; end - start];
                joined.copy(start..end, &mut part).unwrap();
                assert_eq!(part, whole[start..end]);
            }
        }
        assert_eq!(types(&list, &[runs.to_vec()]), [DType::I64, DType::U8]);
    }

    #[test]
    fn what_is_not_in_the_list_cannot_be_wanted() {
        assert_eq!(flags(3, &[2, 0]).unwrap(), [1, 0, 1]);
        assert!(flags(3, &[3]).unwrap_err().to_string().starts_with("there is no tensor 3 to sum"));
    }
}
