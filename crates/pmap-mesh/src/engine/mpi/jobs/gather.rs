//! Tensors that are put together of the runs that each rank has.

use std::{iter, ops::Range, sync::Arc};

use bytemuck::cast_slice;
use candle_core::{DType, Device, Result, Shape, Tensor};

use super::{Job, Next, Part, Piece, bytes_of, n_words, pack, parts};
use crate::{
    device::to_device::{on_host, placed},
    engine::{
        layout::{Run, RunLayout},
        mpi::bytes::{Buffer, buffer, with_bytes},
    },
};

/// The one round in which every rank sends its runs to all others.
pub(in super::super) struct Gathering {
    /// This rank's runs.
    own: Vec<Tensor>,
    own_rank: usize,
    by_rank: Arc<[Vec<Run>]>,
    tensors: Vec<(Shape, DType, Device)>,
    /// What arrives is written here at once.
    wholes: Vec<Box<dyn Buffer>>,
    are_leaves: bool,
}

impl Gathering {
    /// The tensors of a layout, each a leaf on `device`, of which this rank has `own` runs.
    pub(in super::super) fn of_layout(
        own: &[Tensor],
        own_rank: usize,
        layout: &RunLayout,
        device: &Device,
    ) -> Result<Self> {
        let by_rank = Arc::clone(layout.by_rank());
        // What nobody takes is not sent.
        let own = own[..by_rank[own_rank].len()].iter().map(on_host).collect::<Result<_>>()?;
        let tensors = layout.tensors().iter();
        let tensors =
            tensors.map(|(shape, dtype)| (shape.clone(), *dtype, device.clone())).collect();
        Self::new(own, own_rank, by_rank, tensors, true)
    }

    pub(super) fn new(
        own: Vec<Tensor>,
        own_rank: usize,
        by_rank: Arc<[Vec<Run>]>,
        tensors: Vec<(Shape, DType, Device)>,
        are_leaves: bool,
    ) -> Result<Self> {
        let wholes = tensors
            .iter()
            .map(|(shape, dtype, _)| buffer(*dtype, shape.elem_count()))
            .collect::<Result<_>>()?;
        Ok(Self { own, own_rank, by_rank, tensors, wholes, are_leaves })
    }

    /// Which bytes of its tensor each run of a rank is.
    fn runs(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        bytes_of(&self.by_rank[rank], |tensor| self.tensors[tensor].1)
    }

    fn n_words(&self, rank: usize) -> usize {
        n_words(self.runs(rank).map(|run| run.len()))
    }

    fn take_piece(&mut self, Piece { from, words, items }: &Piece<'_>) {
        let runs: Vec<Range<usize>> = self.runs(*from).collect();
        for Part { n_th, bytes, place } in parts(runs.iter().map(Range::len), words) {
            let start = runs[n_th].start;
            let whole = self.wholes[self.by_rank[*from][n_th].tensor].bytes_mut();
            whole[start + bytes.start..start + bytes.end]
                .copy_from_slice(&cast_slice(items)[place]);
        }
    }

    fn take_own(&mut self) -> Result<()> {
        let runs: Vec<Range<usize>> = self.runs(self.own_rank).collect();
        for ((run, x), bytes) in iter::zip(&self.by_rank[self.own_rank], &self.own).zip(runs) {
            let into = &mut self.wholes[run.tensor].bytes_mut()[bytes];
            with_bytes(x, |bytes| {
                into.copy_from_slice(bytes);
                Ok(())
            })?;
        }
        Ok(())
    }
}

impl Job for Gathering {
    fn n_outgoing(&self, _: usize) -> usize {
        self.n_words(self.own_rank)
    }

    fn n_incoming(&self, from: usize) -> usize {
        self.n_words(from)
    }

    fn pack(&self, _: usize, words: Range<usize>, into: &mut [u64]) -> Result<()> {
        let n_bytes = self.runs(self.own_rank).map(|run| run.len());
        pack(parts(n_bytes, &words), |n_th| (&self.own[n_th], 0), into)
    }

    fn take(&mut self, pieces: &[Piece<'_>]) -> Result<()> {
        for piece in pieces {
            self.take_piece(piece);
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<Next> {
        self.take_own()?;
        let are_leaves = self.are_leaves;
        let whole = |(whole, (shape, _, device)): (Box<dyn Buffer>, (Shape, DType, Device))| {
            if are_leaves {
                placed(whole.leaf(shape.dims())?, &device)
            } else {
                whole.tensor(shape.dims())?.to_device(&device)
            }
        };
        let wholes = self.wholes.into_iter().zip(self.tensors).map(whole);
        Ok(Next::Results(wholes.collect::<Result<_>>()?))
    }
}
