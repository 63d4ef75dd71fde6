//! Lists of tensors that are summed at once, each for the ranks that want it.

use std::collections::BTreeMap;

use candle_core::{DType, Result, Tensor, bail};

use super::{
    bytes::{buffer, with_all_bytes, with_bytes},
    transfer::Call,
    wire::SMALL_BYTES,
};
use crate::reduce::Reduction;

/// Tensors of one type of which each goes to one rank alone.
struct Round {
    dtype: DType,
    /// The number of the tensor that each rank gets, if it gets one.
    by_rank: Vec<Option<usize>>,
}

/// For each tensor of a list whether it is wanted: a byte each, as it travels with a header.
pub(super) fn flags(len: usize, wanted: &[usize]) -> Result<Vec<u8>> {
    if len > SMALL_BYTES {
        bail!("lists of more than {SMALL_BYTES} tensors cannot be summed over processes");
    }
    let mut flags = vec![0; len];
    for &n in wanted {
        match flags.get_mut(n) {
            Some(flag) => *flag = 1,
            None => bail!("there is no tensor {n} to sum"),
        }
    }
    Ok(flags)
}

impl Call<'_> {
    /// The sums that this rank wants, by their numbers in the list.
    pub(super) fn reduce_list(
        &self,
        list: &[Tensor],
        flags: &[u8],
        reduction: Reduction,
    ) -> Result<BTreeMap<usize, Tensor>> {
        let receivers = self.receivers(list, flags)?;
        let mut sums = BTreeMap::new();
        for (n, ranks) in receivers.iter().enumerate().filter(|(_, ranks)| ranks.len() > 1) {
            let sum = self.reduce_tensor(&list[n], reduction)?;
            if ranks.contains(&self.site.rank) {
                sums.insert(n, sum);
            }
        }
        for round in rounds(list, &receivers, self.site.size()) {
            sums.extend(self.reduce_round(list, &round, reduction)?);
        }
        Ok(sums)
    }

    /// For each tensor the ranks that want its sum.
    fn receivers(&self, list: &[Tensor], flags: &[u8]) -> Result<Vec<Vec<usize>>> {
        let received = self.exchange_headers(list, 0, flags)?;
        let flags = received.all_inline(flags, self.site.rank);
        let of = |n: usize| (0..flags.len()).filter(|&rank| flags[rank][n] != 0).collect();
        Ok((0..list.len()).map(of).collect())
    }

    fn reduce_tensor(&self, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let mut sum = buffer(x.dtype(), x.elem_count())?;
        with_bytes(x, |bytes| self.reduce(x.dtype(), bytes, sum.bytes_mut(), reduction))?;
        sum.tensor(x.dims())
    }

    /// The sum that this rank gets in a round, with its number, if it gets one.
    fn reduce_round(
        &self,
        list: &[Tensor],
        round: &Round,
        reduction: Reduction,
    ) -> Result<Option<(usize, Tensor)>> {
        let summands: Vec<Option<&Tensor>> =
            round.by_rank.iter().map(|n| n.map(|n| &list[n])).collect();
        let own = round.by_rank[self.site.rank];
        let n_items = match own {
            Some(n) => list[n].elem_count(),
            None => 0,
        };
        let mut sum = buffer(round.dtype, n_items)?;
        with_all_bytes(&summands, |bytes| {
            self.reduce_to_each(round.dtype, bytes, sum.bytes_mut(), reduction)
        })?;
        own.map(|n| Ok((n, sum.tensor(list[n].dims())?))).transpose()
    }
}

/// What one rank alone wants goes straight to it: in each round, one tensor of a type to each rank.
fn rounds(list: &[Tensor], receivers: &[Vec<usize>], n_ranks: usize) -> Vec<Round> {
    let mut queues: BTreeMap<&str, (DType, Vec<Vec<usize>>)> = BTreeMap::new();
    for (n, ranks) in receivers.iter().enumerate() {
        if let [only] = ranks[..] {
            let dtype = list[n].dtype();
            let of_type = || (dtype, vec![Vec::new(); n_ranks]);
            queues.entry(dtype.as_str()).or_insert_with(of_type).1[only].push(n);
        }
    }
    let mut rounds = Vec::new();
    for (dtype, queues) in queues.into_values() {
        let longest = queues.iter().fold(0, |longest, queue| longest.max(queue.len()));
        rounds.extend((0..longest).map(|round| {
            let by_rank = queues.iter().map(|queue| queue.get(round).copied()).collect();
            Round { dtype, by_rank }
        }));
    }
    rounds
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn each_round_has_one_type_and_one_tensor_for_each_rank() {
        let zeros = |dtype| Tensor::zeros(2, dtype, &Device::Cpu).unwrap();
        let list = [DType::F32, DType::F64, DType::F32, DType::F32, DType::F32].map(zeros);
        let receivers = [vec![0], vec![1], vec![0, 1], vec![0], vec![1]];
        let rounds: Vec<_> = rounds(&list, &receivers, 2)
            .into_iter()
            .map(|round| (round.dtype, round.by_rank))
            .collect();
        let expected = [
            (DType::F32, vec![Some(0), Some(4)]),
            (DType::F32, vec![Some(3), None]),
            (DType::F64, vec![None, Some(1)]),
        ];
        assert_eq!(rounds, expected);
    }

    #[test]
    fn what_is_not_in_the_list_cannot_be_wanted() {
        assert_eq!(flags(3, &[2, 0]).unwrap(), [1, 0, 1]);
        assert!(flags(3, &[3]).unwrap_err().to_string().starts_with("there is no tensor 3 to sum"));
        assert!(flags(SMALL_BYTES + 1, &[]).is_err());
    }
}
