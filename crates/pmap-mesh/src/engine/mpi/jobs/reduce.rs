//! Runs of a list that are reduced, each for the ranks that want it.

use std::{ops::Range, sync::Arc};

use bytemuck::cast_slice;
use candle_core::{Device, Result, Tensor, bail};

use super::{Gathering, Job, Next, Part, Piece, bytes_of, n_words, pack, parts};
use crate::{
    device::to_device::on_host,
    engine::{
        layout::Run,
        mpi::bytes::{Buffer, buffer, with_part},
    },
    reduce::{self, Reduction, parts::balanced},
};

/// A round in which every rank sends each other one the runs that this one reduces.
pub(in super::super) struct Reducing {
    list: Vec<Tensor>,
    devices: Vec<Device>,
    own_rank: usize,
    by_rank: Arc<[Vec<Run>]>,
    reduction: Reduction,
    /// The reductions of this rank's runs, as far as they have been made.
    sums: Vec<Box<dyn Buffer>>,
    /// Whether the reductions are then gathered by all.
    for_all: bool,
}

impl Reducing {
    /// The one round of a reduction of which each rank gets its runs.
    pub(in super::super) fn of_runs(
        list: &[Tensor],
        own_rank: usize,
        by_rank: Arc<[Vec<Run>]>,
        reduction: Reduction,
    ) -> Result<Self> {
        Self::new(list, own_rank, by_rank, reduction, false)
    }

    /// The first of two rounds of a reduction of which all get everything: each rank makes a part.
    pub(in super::super) fn for_all(
        list: &[Tensor],
        own_rank: usize,
        n_ranks: usize,
        reduction: Reduction,
    ) -> Result<Self> {
        let share = |rank| {
            let items = list.iter().map(|x| balanced(x.elem_count(), rank, n_ranks)).enumerate();
            items.map(|(tensor, items)| Run { tensor, items }).collect()
        };
        Self::new(list, own_rank, (0..n_ranks).map(share).collect(), reduction, true)
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
        let sum = |Run { tensor, items }: &Run| buffer(list[*tensor].dtype(), items.len());
        let sums = by_rank[own_rank].iter().map(sum).collect::<Result<_>>()?;
        let devices = list.iter().map(|x| x.device().clone()).collect();
        let list = list.iter().map(on_host).collect::<Result<_>>()?;
        Ok(Self { list, devices, own_rank, by_rank, reduction, sums, for_all })
    }

    /// Which bytes of its tensor each run of a rank is.
    fn runs(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        bytes_of(&self.by_rank[rank], |tensor| self.list[tensor].dtype())
    }

    /// Reduces a part of one of this rank's runs, of which the others' lies in their pieces.
    fn reduce(&mut self, part: &Part, run_start: usize, pieces: &[Piece<'_>]) -> Result<()> {
        let Part { n_th, bytes, place } = part;
        let x = &self.list[self.by_rank[self.own_rank][*n_th].tensor];
        let sum = &mut self.sums[*n_th].bytes_mut()[bytes.clone()];
        with_part(x, run_start + bytes.start..run_start + bytes.end, |own| {
            let mut summands: Vec<&[u8]> =
                pieces.iter().map(|piece| &cast_slice(piece.items)[place.clone()]).collect();
            summands.insert(self.own_rank, own);
            reduce::bytes(x.dtype(), &summands, self.reduction, sum)
        })
    }

    /// The second round, in which all get what each has reduced.
    fn gathering(self, own: Vec<Tensor>) -> Result<Next> {
        let tensor = |(x, device): (&Tensor, Device)| (x.shape().clone(), x.dtype(), device);
        let tensors = self.list.iter().zip(self.devices).map(tensor).collect();
        let job = Gathering::new(own, self.own_rank, self.by_rank, tensors, false)?;
        Ok(Next::Round(Box::new(job)))
    }
}

impl Job for Reducing {
    fn n_outgoing(&self, to: usize) -> usize {
        n_words(self.runs(to).map(|run| run.len()))
    }

    fn n_incoming(&self, _: usize) -> usize {
        self.n_outgoing(self.own_rank)
    }

    fn pack(&self, to: usize, words: Range<usize>, into: &mut [u64]) -> Result<()> {
        let runs: Vec<Range<usize>> = self.runs(to).collect();
        let run = |n_th: usize| (&self.list[self.by_rank[to][n_th].tensor], runs[n_th].start);
        pack(parts(runs.iter().map(Range::len), &words), run, into)
    }

    fn take(&mut self, pieces: &[Piece<'_>]) -> Result<()> {
        let runs: Vec<Range<usize>> = self.runs(self.own_rank).collect();
        // The others have as many words for this rank, so their pieces are of one size.
        let parts = parts(runs.iter().map(Range::len), &pieces[0].words);
        parts.iter().try_for_each(|part| self.reduce(part, runs[part.n_th].start, pieces))
    }

    fn finish(mut self: Box<Self>) -> Result<Next> {
        let runs = Arc::clone(&self.by_rank);
        let runs = &runs[self.own_rank];
        let sums = std::mem::take(&mut self.sums).into_iter().zip(runs);
        let sums: Vec<Tensor> =
            sums.map(|(sum, run)| sum.tensor(&[run.items.len()])).collect::<Result<_>>()?;
        if self.for_all {
            return self.gathering(sums);
        }
        let devices = runs.iter().map(|run| &self.devices[run.tensor]);
        let results = sums.iter().zip(devices).map(|(sum, device)| sum.to_device(device));
        Ok(Next::Results(results.collect::<Result<_>>()?))
    }
}
