//! The round that reduces runs of a list, each for the ranks that want it.

use std::{ops::Range, sync::Arc};

use bytemuck::cast_slice;
use candle_core::{Device, Result, Tensor, bail};

use super::{
    ByteSpan, GatherRound, MpiRound, ReceivedChunk, RoundOutcome, byte_ranges, n_words, pack, parts,
};
use crate::{
    device::to_device::to_host,
    engine::{
        layout::Run,
        mpi::bytes::{ReceiveBuffer, buffer, with_part},
    },
    reduce::{self, Reduction, parts::balanced},
};

/// A round in which every rank sends each other rank its values of the runs that the receiver
/// reduces.
pub(in super::super) struct ReduceRound {
    list: Vec<Tensor>,
    devices: Vec<Device>,
    own_rank: usize,
    by_rank: Arc<[Vec<Run>]>,
    reduction: Reduction,
    /// The reductions of this rank's runs so far.
    sums: Vec<Box<dyn ReceiveBuffer>>,
    /// Whether a second round gathers the reductions on all ranks.
    for_all: bool,
}

impl ReduceRound {
    /// Prepares the single round of a reduction in which each rank gets its runs.
    pub(in super::super) fn for_runs(
        list: &[Tensor],
        own_rank: usize,
        by_rank: Arc<[Vec<Run>]>,
        reduction: Reduction,
    ) -> Result<Self> {
        Self::new(list, own_rank, by_rank, reduction, false)
    }

    /// Prepares the first of two rounds of a reduction for all ranks: each rank reduces a part.
    pub(in super::super) fn for_all(
        list: &[Tensor],
        own_rank: usize,
        n_ranks: usize,
        reduction: Reduction,
    ) -> Result<Self> {
        let by_rank = (0..n_ranks).map(|rank| {
            let items = list.iter().map(|x| balanced(x.elem_count(), rank, n_ranks)).enumerate();
            items.map(|(tensor, items)| Run { tensor, items }).collect()
        });
        Self::new(list, own_rank, by_rank.collect(), reduction, true)
    }

    fn new(
        list: &[Tensor],
        own_rank: usize,
        by_rank: Arc<[Vec<Run>]>,
        reduction: Reduction,
        for_all: bool,
    ) -> Result<Self> {
        if let Some(x) = list.iter().find(|x| !reduce::has_kernel(x.dtype())) {
            bail!("tensors of type {} cannot be reduced", x.dtype().as_str());
        }
        let sums = by_rank[own_rank]
            .iter()
            .map(|Run { tensor, items }| buffer(list[*tensor].dtype(), items.len()))
            .collect::<Result<_>>()?;
        let devices = list.iter().map(|x| x.device().clone()).collect();
        let list = list.iter().map(to_host).collect::<Result<_>>()?;
        Ok(Self { list, devices, own_rank, by_rank, reduction, sums, for_all })
    }

    /// Returns the bytes of each run of a rank in its tensor.
    fn runs(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        byte_ranges(&self.by_rank[rank], |tensor| self.list[tensor].dtype())
    }

    /// Reduces a part of one of this rank's runs with the received parts in `chunks`.
    fn reduce(
        &mut self,
        part: &ByteSpan,
        run_start: usize,
        chunks: &[ReceivedChunk<'_>],
    ) -> Result<()> {
        let ByteSpan { index, in_run, in_chunk } = part;
        let x = &self.list[self.by_rank[self.own_rank][*index].tensor];
        let sum = &mut self.sums[*index].bytes_mut()[in_run.clone()];
        with_part(x, run_start + in_run.start..run_start + in_run.end, |own| {
            let mut summands: Vec<&[u8]> =
                chunks.iter().map(|chunk| &cast_slice(chunk.words)[in_chunk.clone()]).collect();
            summands.insert(self.own_rank, own);
            reduce::raw_items(x.dtype(), &summands, self.reduction, sum)
        })
    }

    /// Prepares the second round, which gathers all reductions.
    fn into_gather_round(self, own: Vec<Tensor>) -> Result<RoundOutcome> {
        let mut tensors = Vec::with_capacity(self.list.len());
        for (x, device) in self.list.iter().zip(self.devices) {
            tensors.push((x.shape().clone(), x.dtype(), device));
        }
        let round = GatherRound::new(own, self.own_rank, self.by_rank, tensors, false)?;
        Ok(RoundOutcome::Round(Box::new(round)))
    }
}

impl MpiRound for ReduceRound {
    fn n_outgoing(&self, to: usize) -> usize {
        n_words(self.runs(to).map(|run| run.len()))
    }

    fn n_incoming(&self, _: usize) -> usize {
        self.n_outgoing(self.own_rank)
    }

    fn pack(&self, to: usize, words: Range<usize>, into: &mut [u64]) -> Result<()> {
        let runs: Vec<Range<usize>> = self.runs(to).collect();
        pack(
            parts(runs.iter().map(Range::len), &words),
            |index: usize| (&self.list[self.by_rank[to][index].tensor], runs[index].start),
            into,
        )
    }

    fn consume(&mut self, chunks: &[ReceivedChunk<'_>]) -> Result<()> {
        let runs: Vec<Range<usize>> = self.runs(self.own_rank).collect();
        // All ranks send this rank the same number of words, so their chunks are of one size.
        let parts = parts(runs.iter().map(Range::len), &chunks[0].range);
        parts.iter().try_for_each(|part| self.reduce(part, runs[part.index].start, chunks))
    }

    fn finish(mut self: Box<Self>) -> Result<RoundOutcome> {
        let by_rank = Arc::clone(&self.by_rank);
        let runs = &by_rank[self.own_rank];
        let mut sums = Vec::with_capacity(runs.len());
        for (sum, run) in std::mem::take(&mut self.sums).into_iter().zip(runs) {
            sums.push(sum.tensor(&[run.items.len()])?);
        }
        if self.for_all {
            return self.into_gather_round(sums);
        }
        let devices = runs.iter().map(|run| &self.devices[run.tensor]);
        let results = sums.iter().zip(devices).map(|(sum, device)| sum.to_device(device));
        Ok(RoundOutcome::Results(results.collect::<Result<_>>()?))
    }
}
