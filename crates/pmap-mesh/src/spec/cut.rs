//! Cutting arguments into shards.

use std::{ops::Range, sync::Arc};

use candle_core::Tensor;

use crate::{
    axes::AxisSet,
    error::fault::{Side, SpecFault},
    grid::{Groups, Topology},
    reduce::parts::balanced,
    spec::{self, Faults, Resolved, Treatment},
};

/// What happens to a dimension whose size the devices do not divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Uneven {
    /// The call is refused; the default, as in JAX.
    #[default]
    Refuse,
    /// Shards are of equal size, the last ones filled up with zeros.
    ///
    /// Results that are put together along the same axes, by [`P::shard`](crate::P::shard) in a
    /// dimension of a padded shard's size, are cut back to the real rows. What a result means cannot
    /// be seen from its size: one that has as many rows by chance must be put together by
    /// [`P::concat`](crate::P::concat), which cuts nothing.
    Pad,
    /// Sizes differ by at most one, the first shards are the larger ones. Every device needs at
    /// least one row. A dimension that was cut unevenly cannot be cut a second time along other
    /// axes; one cut along both at once can.
    Balanced,
}

/// How a dimension is distributed over the groups along some axes: one of the cuts of a [`Cut`].
#[derive(Debug)]
struct Rows {
    set: AxisSet,
    groups: Arc<Groups>,
    /// The size that is cut: with its padding, where an earlier cut has padded it.
    total: usize,
    parts: usize,
    uneven: Uneven,
}

/// The real rows of one shard, of how many, in how many shards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Valid {
    /// The dimension that they are counted along.
    pub(crate) dim: usize,
    /// The place of the first of them in the whole.
    pub(crate) start: usize,
    pub(crate) len: usize,
    /// The size of the shard: the real rows and the padding after them.
    pub(crate) padded: usize,
    pub(crate) total: usize,
    pub(crate) parts: usize,
}

impl Rows {
    fn rank(&self, slot: usize) -> usize {
        self.groups.place(slot).rank
    }

    /// The rows of a rank, of the first `real` ones, which are no padding.
    fn of(&self, rank: usize, real: usize) -> Range<usize> {
        match self.uneven {
            Uneven::Pad => {
                let start = (rank * self.padded()).min(real);
                start..(start + self.padded()).min(real)
            }
            Uneven::Refuse | Uneven::Balanced => balanced(self.total, rank, self.parts),
        }
    }

    /// The size of every shard after padding.
    fn padded(&self) -> usize {
        self.total.div_ceil(self.parts)
    }

    /// The size of a rank's shard, with its padding.
    fn size(&self, rank: usize) -> usize {
        match self.uneven {
            Uneven::Pad => self.padded(),
            Uneven::Refuse | Uneven::Balanced => self.of(rank, self.total).len(),
        }
    }

    fn is_even(&self) -> bool {
        self.total.is_multiple_of(self.parts)
    }

    /// Whether a dimension of this size can be cut so.
    fn is_possible(&self) -> bool {
        self.is_even()
            || match self.uneven {
                Uneven::Refuse => false,
                Uneven::Pad => true,
                Uneven::Balanced => self.total >= self.parts,
            }
    }

    /// The rows of a rank in dimension `dim` of a tensor: a view, without a copy, unless it is
    /// padded.
    fn cut(&self, tensor: &Tensor, dim: usize, rank: usize) -> candle_core::Result<Tensor> {
        let rows = self.of(rank, self.total);
        match self.uneven {
            Uneven::Pad if rows.is_empty() || tensor.elem_count() == 0 => {
                zeros(tensor, dim, self.padded())
            }
            Uneven::Pad => tensor.narrow(dim, rows.start, rows.len())?.pad_with_zeros(
                dim,
                0,
                self.padded() - rows.len(),
            ),
            Uneven::Refuse | Uneven::Balanced => tensor.narrow(dim, rows.start, rows.len()),
        }
    }
}

/// How one argument is cut: checked once, before any replica starts. Each cut is one of a dimension
/// along a set of axes; a dimension may be cut again along others.
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
        let mut cut = Self(Vec::with_capacity(spec.len()));
        for &(set, treatment) in spec {
            // Other treatments of an argument are faults that have been noted.
            let Treatment::Shard(dim) = treatment else { continue };
            let Some(dim) = faults.note(spec::find_dim(Side::In, index, dim, input)) else {
                continue;
            };
            let before = cut.of_dim(dim).last();
            // What all earlier shards of the dimension have, if they are of one size.
            let total = before.map_or(input.dims()[dim], Rows::padded);
            let groups = topology.groups(set);
            let rows = Rows { set, groups, total, parts: topology.size(set), uneven };
            if let Some(fault) = fault(index, input, dim, before, &rows) {
                faults.add(fault);
            }
            cut.0.push((dim, rows));
        }
        cut
    }

    /// The cuts of a dimension, in order.
    fn of_dim(&self, dim: usize) -> impl Iterator<Item = &Rows> {
        self.0.iter().filter(move |(cut, _)| *cut == dim).map(|(_, rows)| rows)
    }

    pub(crate) fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// The real rows of a slot's shard in the first dimension that is cut, after all cuts of it;
    /// `None` if no dimension is.
    pub(crate) fn valid(&self, slot: usize) -> Option<Valid> {
        let (dim, first) = self.0.first()?;
        let last = self.0.iter().rposition(|(cut, _)| cut == dim)?;
        let parts = self.of_dim(*dim).map(|rows| rows.parts).product();
        let real = self.real(last, slot);
        let last = &self.0[last].1;
        Some(Valid {
            dim: *dim,
            start: real.start,
            len: real.len(),
            padded: last.size(last.rank(slot)),
            total: first.total,
            parts,
        })
    }

    /// A result of a slot without the padding of the cut along `set`, if it still has it.
    pub(crate) fn trim(
        &self,
        result: &Tensor,
        dim: usize,
        set: AxisSet,
        slot: usize,
    ) -> candle_core::Result<Tensor> {
        let is_padded = |(_, rows): &(usize, Rows)| {
            rows.set == set && rows.uneven == Uneven::Pad && result.dims()[dim] == rows.padded()
        };
        match self.0.iter().position(is_padded) {
            Some(number) => result.narrow(dim, 0, self.real(number, slot).len()),
            None => Ok(result.clone()),
        }
    }

    /// The rows of the whole that a slot has, without padding, after cut number `number` and those
    /// of the same dimension before it.
    fn real(&self, number: usize, slot: usize) -> Range<usize> {
        let (dim, rows) = &self.0[number];
        let before = match self.0[..number].iter().rposition(|(cut, _)| cut == dim) {
            Some(before) => self.real(before, slot),
            None => 0..rows.total,
        };
        let here = rows.of(rows.rank(slot), before.len());
        before.start + here.start..before.start + here.end
    }

    /// The shard of a slot.
    pub(crate) fn view(&self, input: &Tensor, slot: usize) -> candle_core::Result<Tensor> {
        self.0
            .iter()
            .try_fold(input.clone(), |shard, (dim, rows)| rows.cut(&shard, *dim, rows.rank(slot)))
    }
}

/// Why a dimension cannot be cut so, after the cut of it `before`.
fn fault(
    index: usize,
    input: &Tensor,
    dim: usize,
    before: Option<&Rows>,
    rows: &Rows,
) -> Option<SpecFault> {
    let Rows { total: size, parts, .. } = *rows;
    let shape = input.dims().to_vec();
    match before {
        // Noted with the cut before.
        Some(before) if !before.is_possible() => None,
        // Balanced shards of different sizes cannot all be cut in the same way.
        Some(before) if !before.is_even() && rows.uneven != Uneven::Pad => {
            Some(SpecFault::CutAfterUneven {
                index,
                dim,
                size: before.total,
                shape,
                parts: before.parts,
            })
        }
        _ => (!rows.is_possible()).then_some(SpecFault::NotDivisible {
            index,
            dim,
            size,
            shape,
            parts,
        }),
    }
}

fn zeros(like: &Tensor, dim: usize, size: usize) -> candle_core::Result<Tensor> {
    let mut shape = like.dims().to_vec();
    shape[dim] = size;
    Tensor::zeros(shape, like.dtype(), like.device())
}
