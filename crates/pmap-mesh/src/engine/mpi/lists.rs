//! Reductions of lists of tensors in which each rank wants only some of the tensors.

use std::{collections::BTreeMap, sync::Arc};

use candle_core::{Result, Tensor, bail};

use super::{
    bytes::{buffer, with_bytes},
    rounds::ReduceRound,
    transfer::{MessageKind, MpiCall},
};
use crate::{engine::layout::Run, reduce::Reduction};

impl MpiCall<'_> {
    /// Exchanges the indexes of the wanted tensors with all ranks. Returns the sorted indexes of
    /// each rank, by rank.
    pub(super) fn exchange_requests(
        &self,
        list: &[Tensor],
        wanted: &[usize],
    ) -> Result<Vec<Vec<usize>>> {
        let own = flags(list.len(), wanted)?;
        let all = self.exchange_bytes(list, &own)?;
        Ok(all.iter().map(|flags| (0..flags.len()).filter(|&n| flags[n] != 0).collect()).collect())
    }

    /// Exchanges byte strings of equal length with all ranks; returns the strings by rank.
    fn exchange_bytes(&self, list: &[Tensor], own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let received = self.exchange_headers(list, 0, own)?;
        let mut all = vec![own.to_vec(); self.ctx.size()];
        let mut late = Vec::new();
        for (rank, bytes) in all.iter_mut().enumerate().filter(|(rank, _)| *rank != self.ctx.rank) {
            if received.headers[rank].is_inline {
                bytes.copy_from_slice(received.inline_data(rank));
            } else {
                late.push((rank, MessageKind::Data, &mut bytes[..]));
            }
        }
        let sent = if received.headers[self.ctx.rank].is_inline { &[] } else { own };
        self.transfer(late, self.others().map(|to| (to, MessageKind::Data, sent)));
        Ok(all)
    }

    /// Returns the reductions of the tensors that this rank wants, by index. `wanted` has the
    /// indexes that each rank wants.
    pub(super) fn reduce_wanted(
        &self,
        list: &[Tensor],
        wanted: &[Vec<usize>],
        reduction: Reduction,
    ) -> Result<BTreeMap<usize, Tensor>> {
        let mut n_receivers = vec![0_usize; list.len()];
        wanted.iter().flatten().for_each(|&n| n_receivers[n] += 1);
        let own = &wanted[self.ctx.rank];
        let mut sums = BTreeMap::new();
        for (n, x) in list.iter().enumerate().filter(|(n, _)| n_receivers[*n] > 1) {
            let sum = self.reduce_tensor(x, reduction)?;
            if own.contains(&n) {
                sums.insert(n, sum);
            }
        }
        // If only one rank wants a tensor, the others send their summands to that rank.
        let runs: Arc<[Vec<Run>]> = wanted
            .iter()
            .map(|indexes| -> Vec<Run> {
                let sole = indexes.iter().filter(|&&n| n_receivers[n] == 1);
                sole.map(|&tensor| Run { tensor, items: 0..list[tensor].elem_count() }).collect()
            })
            .collect();
        let own_runs = &runs[self.ctx.rank];
        let round = ReduceRound::for_runs(list, self.ctx.rank, Arc::clone(&runs), reduction)?;
        let own_sums = self.run_data_rounds(Box::new(round))?;
        for (Run { tensor, .. }, sum) in own_runs.iter().zip(own_sums) {
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

/// Returns a byte for each tensor of a list: 1 if it is wanted.
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
    fn wanted_index_must_exist() {
        assert_eq!(flags(3, &[2, 0]).unwrap(), [1, 0, 1]);
        assert!(flags(3, &[3]).unwrap_err().to_string().starts_with("there is no tensor 3 to sum"));
    }
}
