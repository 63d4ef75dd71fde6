//! Lists of tensors that are reduced, of which each rank wants some.

use std::{collections::BTreeMap, sync::Arc};

use candle_core::{Result, Tensor, bail};

use super::{
    bytes::{buffer, with_bytes},
    jobs::Reducing,
    transfer::{Call, Kind},
};
use crate::{engine::layout::Run, reduce::Reduction};

impl Call<'_> {
    /// What each rank wants of a list, by rank: the numbers of tensors, in their order.
    pub(super) fn exchange_requests(
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
        let runs: Arc<[Vec<Run>]> = wanted.iter().map(alone).collect();
        let own_runs = &runs[self.site.rank];
        let job = Reducing::of_runs(list, self.site.rank, Arc::clone(&runs), reduction)?;
        for (Run { tensor, .. }, sum) in own_runs.iter().zip(self.run_agreed(Box::new(job))?) {
            sums.insert(*tensor, sum.reshape(list[*tensor].shape())?);
        }
        Ok(sums)
    }

    fn reduce_tensor(&self, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let mut sum = buffer(x.dtype(), x.elem_count())?;
        with_bytes(x, |bytes| self.reduce(x.dtype(), bytes, sum.bytes_mut(), reduction))?;
        sum.tensor(x.dims())
    }
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
    use super::*;

    #[test]
    fn what_is_not_in_the_list_cannot_be_wanted() {
        assert_eq!(flags(3, &[2, 0]).unwrap(), [1, 0, 1]);
        assert!(flags(3, &[3]).unwrap_err().to_string().starts_with("there is no tensor 3 to sum"));
    }
}
