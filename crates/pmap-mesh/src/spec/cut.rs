//! Cutting arguments into shards.

use std::ops::Range;

use candle_core::Tensor;

use crate::{
    mesh::{axes::AxisSet, topology::Topology},
    reduce::parts::balanced,
    spec::{
        self, Faults, Resolved, Treatment,
        fault::{Side, SpecFault},
    },
};

/// What happens to a dimension whose size the devices do not divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Uneven {
    /// The call is refused; the default, as in JAX.
    #[default]
    Refuse,
    /// Shards are of equal size, the last ones filled up with zeros. Results that are put together
    /// from them in a dimension of that size are cut back.
    Pad,
    /// Sizes differ by at most one, the first shards are the larger ones. Every device needs at
    /// least one row.
    Balanced,
}

/// How the rows of a dimension are distributed over the groups along some axes: what
/// [`Replica::valid_len`](crate::Replica::valid_len) tells of the first sharded argument.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) set: AxisSet,
    total: usize,
    parts: usize,
    uneven: Uneven,
}

/// The real rows of one shard, of how many, in how many shards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Valid {
    pub(crate) len: usize,
    pub(crate) total: usize,
    pub(crate) parts: usize,
}

impl Rows {
    /// The rows of a rank.
    fn of(&self, rank: usize) -> Range<usize> {
        match self.uneven {
            Uneven::Pad => {
                let start = (rank * self.padded()).min(self.total);
                start..(start + self.padded()).min(self.total)
            }
            Uneven::Refuse | Uneven::Balanced => balanced(self.total, rank, self.parts),
        }
    }

    /// The size of every shard after padding.
    fn padded(&self) -> usize {
        self.total.div_ceil(self.parts)
    }

    pub(crate) fn valid(&self, rank: usize) -> Valid {
        Valid { len: self.of(rank).len(), total: self.total, parts: self.parts }
    }

    /// Whether a dimension of this size can be cut so.
    fn is_possible(&self) -> bool {
        self.total.is_multiple_of(self.parts)
            || match self.uneven {
                Uneven::Refuse => false,
                Uneven::Pad => true,
                Uneven::Balanced => self.total >= self.parts,
            }
    }

    /// A result of a padded shard without its padding, if it still has it.
    pub(crate) fn trim(
        &self,
        result: &Tensor,
        dim: usize,
        rank: usize,
    ) -> candle_core::Result<Tensor> {
        let is_padded = self.uneven == Uneven::Pad && result.dims()[dim] == self.padded();
        if is_padded { result.narrow(dim, 0, self.of(rank).len()) } else { Ok(result.clone()) }
    }

    /// The rows of a rank in dimension `dim` of a tensor: a view, without a copy, unless it is
    /// padded.
    fn cut(&self, tensor: &Tensor, dim: usize, rank: usize) -> candle_core::Result<Tensor> {
        let rows = self.of(rank);
        match self.uneven {
            Uneven::Pad if rows.is_empty() => zeros(tensor, dim, self.padded()),
            Uneven::Pad => tensor.narrow(dim, rows.start, rows.len())?.pad_with_zeros(
                dim,
                0,
                self.padded() - rows.len(),
            ),
            Uneven::Refuse | Uneven::Balanced => tensor.narrow(dim, rows.start, rows.len()),
        }
    }
}

/// How one argument is cut: checked once, before any replica starts.
#[derive(Debug)]
pub(crate) struct Cut(Vec<(usize, Rows)>);

impl Cut {
    /// The cut of argument `index`.
    pub(crate) fn new(
        index: usize,
        input: &Tensor,
        spec: &Resolved,
        uneven: Uneven,
        topology: &Topology,
        faults: &mut Faults,
    ) -> Self {
        let mut cut = Self(Vec::new());
        for &(set, treatment) in spec {
            // Other treatments of an argument are faults that have been noted.
            let Treatment::Shard(dim) = treatment else { continue };
            let Some(dim) = faults.note(spec::find_dim(Side::In, index, dim, input)) else {
                continue;
            };
            let total = input.dims()[dim];
            let rows = cut.rest(dim, Rows { set, total, parts: topology.size(set), uneven });
            if !rows.is_possible() {
                let Rows { total: size, parts, .. } = rows;
                let shape = input.dims().to_vec();
                faults.add(SpecFault::NotDivisible { index, dim, size, shape, parts });
            }
            cut.0.push((dim, rows));
        }
        cut
    }

    /// What is left of the rows of a dimension, which may be cut already.
    fn rest(&self, dim: usize, rows: Rows) -> Rows {
        match self.0.iter().rev().find(|(cut, _)| *cut == dim) {
            None => rows,
            // Shards of different sizes cannot all be cut again.
            Some((_, cut)) => Rows { total: cut.total / cut.parts, uneven: Uneven::Refuse, ..rows },
        }
    }

    /// The rows of the first dimension that is cut.
    pub(crate) fn rows(&self) -> Option<Rows> {
        self.0.first().map(|(_, rows)| *rows)
    }

    /// The shard of a slot.
    pub(crate) fn view(
        &self,
        input: &Tensor,
        slot: usize,
        topology: &Topology,
    ) -> candle_core::Result<Tensor> {
        self.0.iter().try_fold(input.clone(), |shard, (dim, rows)| {
            let rank = topology.groups(rows.set).place(slot).rank;
            rows.cut(&shard, *dim, rank)
        })
    }
}

fn zeros(like: &Tensor, dim: usize, size: usize) -> candle_core::Result<Tensor> {
    let mut shape = like.dims().to_vec();
    shape[dim] = size;
    Tensor::zeros(shape, like.dtype(), like.device())
}
