//! Collectives as data, and their calls in the crate.

use candle_core::{Result, Tensor};
use pmap_mesh::{MeshAxes, Replica};

use crate::differential::random::Random;

/// A collective of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Psum,
    Pmean,
    Pmax,
    Pmin,
    Pvary,
    AllGather { dim: isize },
    PsumScatter { dim: isize },
    Ppermute { pairs: Vec<(usize, usize)> },
    AllToAll { split: isize, concat: isize },
    Broadcast { root: usize },
    Barrier,
}

/// Returns the index of a dimension that may be counted from the end.
pub(crate) fn dim_index(dim: isize, rank: usize) -> Option<usize> {
    let from_the_end = rank.checked_add_signed(dim);
    let place = usize::try_from(dim).ok().or(from_the_end)?;
    (place < rank).then_some(place)
}

impl Op {
    /// Returns a collective of tensors of `rank` dimensions in a group of this size.
    pub(crate) fn random(random: &mut Random, rank: usize, group: usize) -> Self {
        let kinds = if rank == 0 { 8 } else { 11 };
        match random.less_than(kinds) {
            0 => Self::Psum,
            1 => Self::Pmean,
            2 => Self::Pmax,
            3 => Self::Pmin,
            4 => Self::Pvary,
            5 => Self::Barrier,
            6 => Self::Broadcast { root: random.less_than(group) },
            7 => Self::Ppermute { pairs: pairs(random, group) },
            8 => Self::AllGather { dim: dim(random, rank) },
            9 => Self::PsumScatter { dim: dim(random, rank) },
            _ => Self::AllToAll { split: dim(random, rank), concat: dim(random, rank) },
        }
    }

    /// Calls the collective on one replica.
    pub(crate) fn run(&self, ctx: &Replica, x: &Tensor, axes: MeshAxes) -> Result<Tensor> {
        match self {
            Self::Psum => ctx.psum(x, axes),
            Self::Pmean => ctx.pmean(x, axes),
            Self::Pmax => ctx.pmax(x, axes),
            Self::Pmin => ctx.pmin(x, axes),
            Self::Pvary => ctx.pvary(x, axes),
            Self::AllGather { dim } => ctx.all_gather(x, *dim, axes),
            Self::PsumScatter { dim } => ctx.psum_scatter(x, *dim, axes),
            Self::Ppermute { pairs } => ctx.ppermute(x, pairs, axes),
            Self::AllToAll { split, concat } => ctx.all_to_all(x, *split, *concat, axes),
            Self::Broadcast { root } => ctx.broadcast(x, *root, axes),
            Self::Barrier => ctx.barrier(axes).map(|()| x.clone()),
        }
    }
}

/// Returns one of the dimensions, counted from either end.
fn dim(random: &mut Random, rank: usize) -> isize {
    let dim = random.less_than(rank).cast_signed();
    if random.one_in(3) { dim - rank.cast_signed() } else { dim }
}

/// Returns some pairs of a random permutation.
fn pairs(random: &mut Random, group: usize) -> Vec<(usize, usize)> {
    let to = random.shuffled((0..group).collect());
    let pairs = to.into_iter().enumerate().filter(|_| !random.one_in(4)).collect();
    random.shuffled(pairs)
}
