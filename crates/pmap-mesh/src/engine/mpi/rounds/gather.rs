//! The round that gathers tensors from the runs of all ranks.

use std::{iter, ops::Range, sync::Arc};

use bytemuck::cast_slice;
use candle_core::{DType, Device, Result, Shape, Tensor};

use super::{ByteSpan, MpiRound, ReceivedChunk, RoundOutcome, byte_ranges, n_words, pack, parts};
use crate::{
    device::to_device::{leaf_to_device, to_host},
    engine::{
        layout::{Run, RunLayout},
        mpi::bytes::{ReceiveBuffer, buffer, with_bytes},
    },
};

/// The single round in which every rank sends its runs to all others.
pub(in super::super) struct GatherRound {
    /// This rank's runs.
    own: Vec<Tensor>,
    own_rank: usize,
    by_rank: Arc<[Vec<Run>]>,
    tensors: Vec<(Shape, DType, Device)>,
    /// The results; received runs are written here directly.
    results: Vec<Box<dyn ReceiveBuffer>>,
    are_leaves: bool,
}

impl GatherRound {
    /// Gathers the tensors of a layout, each as a leaf on `device`; `own` are this rank's runs.
    pub(in super::super) fn for_layout(
        own: &[Tensor],
        own_rank: usize,
        layout: &RunLayout,
        device: &Device,
    ) -> Result<Self> {
        let by_rank = Arc::clone(layout.by_rank());
        // Runs beyond the layout's list are not sent.
        let own = own[..by_rank[own_rank].len()].iter().map(to_host).collect::<Result<_>>()?;
        let tensors = layout
            .tensors()
            .iter()
            .map(|(shape, dtype)| (shape.clone(), *dtype, device.clone()))
            .collect();
        Self::new(own, own_rank, by_rank, tensors, true)
    }

    pub(super) fn new(
        own: Vec<Tensor>,
        own_rank: usize,
        by_rank: Arc<[Vec<Run>]>,
        tensors: Vec<(Shape, DType, Device)>,
        are_leaves: bool,
    ) -> Result<Self> {
        let results = tensors
            .iter()
            .map(|(shape, dtype, _)| buffer(*dtype, shape.elem_count()))
            .collect::<Result<_>>()?;
        Ok(Self { own, own_rank, by_rank, tensors, results, are_leaves })
    }

    /// Returns the bytes of each run of a rank in its tensor.
    fn runs(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        byte_ranges(&self.by_rank[rank], |tensor| self.tensors[tensor].1)
    }

    /// Returns the number of words that a rank sends.
    fn n_words(&self, rank: usize) -> usize {
        n_words(self.runs(rank).map(|run| run.len()))
    }

    /// Copies received words to the results.
    fn write_chunk(&mut self, ReceivedChunk { from, range, words }: &ReceivedChunk<'_>) {
        let runs: Vec<Range<usize>> = self.runs(*from).collect();
        for ByteSpan { index, in_run, in_chunk } in parts(runs.iter().map(Range::len), range) {
            let start = runs[index].start;
            let result = self.results[self.by_rank[*from][index].tensor].bytes_mut();
            result[start + in_run.start..start + in_run.end]
                .copy_from_slice(&cast_slice(words)[in_chunk]);
        }
    }

    /// Copies this rank's runs to the results.
    fn write_own(&mut self) -> Result<()> {
        let runs: Vec<Range<usize>> = self.runs(self.own_rank).collect();
        for ((run, x), bytes) in iter::zip(&self.by_rank[self.own_rank], &self.own).zip(runs) {
            let into = &mut self.results[run.tensor].bytes_mut()[bytes];
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
        let n_bytes = self.runs(self.own_rank).map(|run| run.len());
        pack(parts(n_bytes, &words), |index| (&self.own[index], 0), into)
    }

    fn consume(&mut self, chunks: &[ReceivedChunk<'_>]) -> Result<()> {
        for chunk in chunks {
            self.write_chunk(chunk);
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<RoundOutcome> {
        self.write_own()?;
        let mut results = Vec::with_capacity(self.results.len());
        for (result, (shape, _, device)) in self.results.into_iter().zip(self.tensors) {
            results.push(if self.are_leaves {
                leaf_to_device(result.leaf(shape.dims())?, &device)?
            } else {
                result.tensor(shape.dims())?.to_device(&device)?
            });
        }
        Ok(RoundOutcome::Results(results))
    }
}
