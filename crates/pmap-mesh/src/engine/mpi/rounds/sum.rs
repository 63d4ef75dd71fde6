//! The round of sums: each rank receives the other ranks' items of its own runs, which are ranges of
//! tensors, and adds them.

use std::{ops::Range, sync::Arc};

use bytemuck::cast_slice;
use candle_core::{Device, Result, Tensor, bail};

use super::{ByteSpan, MpiRound, ReceivedChunk, byte_ranges, n_words, pack, spans_in_chunk};
use crate::{
    device::to_device::to_host,
    engine::{
        layout::Run,
        mpi::bytes::{ReceiveBuffer, buffer, with_part},
    },
    reduce::{self, Reduction},
};

/// A round in which each rank receives the other ranks' items for its own runs, and adds these items.
pub(in super::super) struct SumRound {
    list: Vec<Tensor>,
    devices: Vec<Device>,
    own_rank: usize,
    /// The runs that each rank adds.
    runs_by_rank: Arc<[Vec<Run>]>,
    /// The sums of this rank's runs so far.
    sums: Vec<Box<dyn ReceiveBuffer>>,
}

impl SumRound {
    /// Prepares the round in which each rank gets the sums of its runs.
    pub(in super::super) fn new(
        list: &[Tensor],
        own_rank: usize,
        runs_by_rank: Arc<[Vec<Run>]>,
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
        Ok(Self { list, devices, own_rank, runs_by_rank, sums })
    }

    /// Returns the range of bytes that each run of a rank has in its tensor.
    fn run_bytes(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        byte_ranges(&self.runs_by_rank[rank], |tensor_index| self.list[tensor_index].dtype())
    }

    /// Returns the tensor that contains a run of a rank.
    fn run_tensor(&self, rank: usize, run_index: usize) -> &Tensor {
        &self.list[self.runs_by_rank[rank][run_index].tensor]
    }

    /// Adds the `span` of one of this rank's runs that is in `chunks`. The run begins at byte
    /// `run_start` of its tensor.
    fn add(
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
            reduce::reduce_raw_items(x.dtype(), &summands, Reduction::Sum, sum)
        })
    }
}

impl MpiRound for SumRound {
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
        spans.iter().try_for_each(|span| self.add(span, run_ranges[span.run_index].start, chunks))
    }

    fn finish(self: Box<Self>) -> Result<Vec<Tensor>> {
        let Self { devices, own_rank, runs_by_rank, sums, .. } = *self;
        let runs = sums.into_iter().zip(&runs_by_rank[own_rank]);
        runs.map(|(sum, Run { tensor, items })| {
            sum.tensor(&[items.len()])?.to_device(&devices[*tensor])
        })
        .collect()
    }
}
