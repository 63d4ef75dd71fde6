//! The reduction round: each rank receives the other ranks' items of its own runs, which are ranges
//! of tensors, and reduces them.

use std::{ops::Range, sync::Arc};

use bytemuck::cast_slice;
use candle_core::{Device, Result, Tensor, bail};

use super::{
    ByteSpan, GatherRound, MpiRound, ReceivedChunk, RoundOutcome, byte_ranges, n_words, pack,
    spans_in_chunk,
};
use crate::{
    device::to_device::to_host,
    engine::{
        layout::Run,
        mpi::bytes::{ReceiveBuffer, buffer, with_part},
    },
    reduce::{self, Reduction, parts::balanced},
};

/// A round in which each rank receives the other ranks' items for its own runs, and reduces these
/// items.
pub(in super::super) struct ReduceRound {
    list: Vec<Tensor>,
    devices: Vec<Device>,
    own_rank: usize,
    /// The runs that each rank reduces.
    runs_by_rank: Arc<[Vec<Run>]>,
    reduction: Reduction,
    /// The reductions of this rank's runs so far.
    sums: Vec<Box<dyn ReceiveBuffer>>,
    /// Whether a second round gathers the reductions of all ranks on every rank.
    for_all: bool,
}

impl ReduceRound {
    /// Prepares the only round of a reduction in which each rank gets the reductions of its runs.
    pub(in super::super) fn for_runs(
        list: &[Tensor],
        own_rank: usize,
        runs_by_rank: Arc<[Vec<Run>]>,
        reduction: Reduction,
    ) -> Result<Self> {
        if let Some(x) = list.iter().find(|x| !reduce::has_kernel(x.dtype())) {
            bail!("tensors of type {} cannot be reduced", x.dtype().as_str());
        }
        let sums = runs_by_rank[own_rank]
            .iter()
            .map(|Run { tensor, items }| buffer(list[*tensor].dtype(), items.len()))
            .collect::<Result<_>>()?;
        let devices = list.iter().map(|x| x.device().clone()).collect();
        let list = list.iter().map(to_host).collect::<Result<_>>()?;
        Ok(Self { list, devices, own_rank, runs_by_rank, reduction, sums, for_all: false })
    }

    /// Prepares the first of two rounds of a reduction in which all ranks get the reductions of the
    /// complete list. Each rank reduces an equal part of each tensor.
    pub(in super::super) fn for_all(
        list: &[Tensor],
        own_rank: usize,
        n_ranks: usize,
        reduction: Reduction,
    ) -> Result<Self> {
        let runs_by_rank = (0..n_ranks).map(|rank| {
            let items = list.iter().map(|x| balanced(x.elem_count(), rank, n_ranks)).enumerate();
            items.map(|(tensor, items)| Run { tensor, items }).collect()
        });
        let round = Self::for_runs(list, own_rank, runs_by_rank.collect(), reduction)?;
        Ok(Self { for_all: true, ..round })
    }

    /// Returns the range of bytes that each run of a rank has in its tensor.
    fn run_bytes(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        byte_ranges(&self.runs_by_rank[rank], |tensor_index| self.list[tensor_index].dtype())
    }

    /// Returns the tensor that contains a run of a rank.
    fn run_tensor(&self, rank: usize, run_index: usize) -> &Tensor {
        &self.list[self.runs_by_rank[rank][run_index].tensor]
    }

    /// Reduces the `span` of one of this rank's runs that is in `chunks`. The run begins at byte
    /// `run_start` of its tensor.
    fn reduce(
        &mut self,
        span: &ByteSpan,
        run_start: usize,
        chunks: &[ReceivedChunk<'_>],
    ) -> Result<()> {
        let ByteSpan { run_index, in_run, in_chunk } = span;
        let x = self.run_tensor(self.own_rank, *run_index).clone();
        let sum = &mut self.sums[*run_index].bytes_mut()[in_run.clone()];
        with_part(&x, run_start + in_run.start..run_start + in_run.end, |own| {
            let mut summands: Vec<&[u8]> =
                chunks.iter().map(|chunk| &cast_slice(chunk.words)[in_chunk.clone()]).collect();
            // `chunks` are in order of rank, without this rank. The order decides the rounding, so
            // it is the same on all ranks.
            summands.insert(self.own_rank, own);
            reduce::reduce_raw_items(x.dtype(), &summands, self.reduction, sum)
        })
    }

    /// Returns the second round, which gathers the reductions of all ranks; `own` are this rank's.
    fn into_gather_round(self, own: Vec<Tensor>) -> Result<RoundOutcome> {
        let mut tensors = Vec::with_capacity(self.list.len());
        for (x, device) in self.list.iter().zip(self.devices) {
            tensors.push((x.shape().clone(), x.dtype(), device));
        }
        let round = GatherRound::new(own, self.own_rank, self.runs_by_rank, tensors)?;
        Ok(RoundOutcome::Round(Box::new(round)))
    }
}

impl MpiRound for ReduceRound {
    fn n_outgoing(&self, to: usize) -> usize {
        n_words(self.run_bytes(to).map(|bytes| bytes.len()))
    }

    fn n_incoming(&self, _: usize) -> usize {
        self.n_outgoing(self.own_rank)
    }

    fn pack(&self, to: usize, words: Range<usize>, into: &mut [u64]) -> Result<()> {
        let run_ranges: Vec<Range<usize>> = self.run_bytes(to).collect();
        pack(
            spans_in_chunk(run_ranges.iter().map(Range::len), &words),
            |run_index: usize| (self.run_tensor(to, run_index), run_ranges[run_index].start),
            into,
        )
    }

    fn consume(&mut self, chunks: &[ReceivedChunk<'_>]) -> Result<()> {
        let run_ranges: Vec<Range<usize>> = self.run_bytes(self.own_rank).collect();
        // All ranks send this rank the same number of words, so their chunks are of one size.
        let spans = spans_in_chunk(run_ranges.iter().map(Range::len), &chunks[0].range);
        spans
            .iter()
            .try_for_each(|span| self.reduce(span, run_ranges[span.run_index].start, chunks))
    }

    fn finish(mut self: Box<Self>) -> Result<RoundOutcome> {
        let runs_by_rank = Arc::clone(&self.runs_by_rank);
        let runs = &runs_by_rank[self.own_rank];
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
