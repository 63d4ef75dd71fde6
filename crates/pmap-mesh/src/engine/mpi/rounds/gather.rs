//! The round that assembles tensors from the runs of all ranks.

use std::{iter, ops::Range};

use bytemuck::cast_slice;
use candle_core::{Device, Result, Tensor};

use super::{ByteSpan, MpiRound, ReceivedChunk, byte_ranges, n_words, pack, spans_in_chunk};
use crate::{
    device::to_device::{leaf_to_device, to_host},
    engine::{
        layout::RunLayout,
        mpi::bytes::{ReceiveBuffer, buffer, with_bytes},
    },
};

/// A round in which every rank sends its runs to all other ranks.
pub(in super::super) struct GatherRound {
    /// This rank's runs.
    own: Vec<Tensor>,
    own_rank: usize,
    layout: RunLayout,
    /// The device of the results.
    device: Device,
    /// The items of each result; received runs are written here directly.
    results: Vec<Box<dyn ReceiveBuffer>>,
}

impl GatherRound {
    /// Prepares to gather the tensors of a layout, each as a leaf on `device`; `own` are this
    /// rank's runs.
    pub(in super::super) fn new(
        own: &[Tensor],
        own_rank: usize,
        layout: RunLayout,
        device: Device,
    ) -> Result<Self> {
        // Tensors of `own` after the runs of the layout are not sent.
        let n_own = layout.runs(own_rank).len();
        let own = own[..n_own].iter().map(to_host).collect::<Result<_>>()?;
        let tensors = layout.tensors().iter();
        let results = tensors
            .map(|(shape, dtype)| buffer(*dtype, shape.elem_count()))
            .collect::<Result<_>>()?;
        Ok(Self { own, own_rank, layout, device, results })
    }

    /// Returns the range of bytes that each run of a rank has in its tensor.
    fn run_bytes(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        byte_ranges(self.layout.runs(rank), |tensor| self.layout.tensors()[tensor].1)
    }

    /// Returns the number of words that a rank sends.
    fn n_words(&self, rank: usize) -> usize {
        n_words(self.run_bytes(rank).map(|bytes| bytes.len()))
    }

    /// Copies received words to the results.
    fn write_chunk(&mut self, ReceivedChunk { from, range, words }: &ReceivedChunk<'_>) {
        let runs: Vec<Range<usize>> = self.run_bytes(*from).collect();
        for ByteSpan { run_index, in_run, in_chunk } in
            spans_in_chunk(runs.iter().map(Range::len), range)
        {
            let start = runs[run_index].start;
            let tensor = self.layout.runs(*from)[run_index].tensor;
            let result = self.results[tensor].bytes_mut();
            result[start + in_run.start..start + in_run.end]
                .copy_from_slice(&cast_slice(words)[in_chunk]);
        }
    }

    /// Copies this rank's runs to the results.
    fn write_own(&mut self) -> Result<()> {
        let runs: Vec<Range<usize>> = self.run_bytes(self.own_rank).collect();
        let own_runs = iter::zip(self.layout.runs(self.own_rank), &self.own);
        for ((run, x), run_bytes) in own_runs.zip(runs) {
            let into = &mut self.results[run.tensor].bytes_mut()[run_bytes];
            with_bytes(x, |bytes| {
                into.copy_from_slice(bytes);
                Ok(())
            })?;
        }
        Ok(())
    }
}

impl MpiRound for GatherRound {
    fn n_outgoing(&self, _: usize) -> usize {
        self.n_words(self.own_rank)
    }

    fn n_incoming(&self, from: usize) -> usize {
        self.n_words(from)
    }

    fn pack(&self, _: usize, words: Range<usize>, into: &mut [u64]) -> Result<()> {
        let run_sizes = self.run_bytes(self.own_rank).map(|bytes| bytes.len());
        pack(spans_in_chunk(run_sizes, &words), |run_index| (&self.own[run_index], 0), into)
    }

    fn consume(&mut self, chunks: &[ReceivedChunk<'_>]) -> Result<()> {
        for chunk in chunks {
            self.write_chunk(chunk);
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<Tensor>> {
        self.write_own()?;
        let Self { results, layout, device, .. } = *self;
        let tensors = results.into_iter().zip(layout.tensors());
        tensors
            .map(|(items, (shape, _))| leaf_to_device(items.leaf(shape.dims())?, &device))
            .collect()
    }
}
