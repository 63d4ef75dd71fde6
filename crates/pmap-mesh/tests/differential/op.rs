//! Collectives as data, and how the crate is asked for them.

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

/// The place of a dimension that may be counted from the end.
pub(crate) fn place_of(dim: isize, rank: usize) -> Option<usize> {
    let from_the_end = rank.checked_add_signed(dim);
    let place = usize::try_from(dim).ok().or(from_the_end)?;
    (place < rank).then_some(place)
}

impl Op {
    /// A collective of tensors of so many dimensions in a group of this size.
    pub(crate) fn random(random: &mut Random, rank: usize, group: usize) -> Self {
        let kinds = if rank == 0 { 8 } else { 11 };
        match random.below(kinds) {
            0 => Self::Psum,
            1 => Self::Pmean,
            2 => Self::Pmax,
            3 => Self::Pmin,
            4 => Self::Pvary,
            5 => Self::Barrier,
            6 => Self::Broadcast { root: random.below(group) },
            7 => Self::Ppermute { pairs: pairs(random, group) },
            8 => Self::AllGather { dim: dim(random, rank) },
            9 => Self::PsumScatter { dim: dim(random, rank) },
            _ => Self::AllToAll { split: dim(random, rank), concat: dim(random, rank) },
        }
    }

    /// What the crate makes of it on one replica.
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

/// One of so many dimensions, counted from either end.
fn dim(random: &mut Random, rank: usize) -> isize {
    let dim = random.below(rank).cast_signed();
    if random.one_in(3) { dim - rank.cast_signed() } else { dim }
}

/// Some pairs of a random permutation.
fn pairs(random: &mut Random, group: usize) -> Vec<(usize, usize)> {
    let to = random.shuffled((0..group).collect());
    let pairs = to.into_iter().enumerate().filter(|_| !random.one_in(4)).collect();
    random.shuffled(pairs)
}
