//! Cutting arguments into shards.

use std::{ops::Range, sync::Arc};

use candle_core::Tensor;

use crate::{
    axes::AxisSet,
    error::fault::{Side, SpecFault},
    grid::{Groups, Topology},
    reduce::parts::balanced,
    spec::{self, FaultList, ResolvedSpec, Treatment},
};

/// The treatment of a dimension with a size that the devices do not divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Uneven {
    /// The call fails; the default, as in JAX.
    #[default]
    Refuse,
    /// Shards have equal size; the last ones are padded with zeros.
    ///
    /// [`P::shard`](crate::P::shard) trims a result that is joined along the same axes to the real
    /// rows, if its dimension has the size of a padded shard. The size is the only criterion, so
    /// join a result that has this size by chance with [`P::concat`](crate::P::concat), which trims
    /// nothing.
    Pad,
    /// Sizes differ by at most one; the first shards are the larger ones. Every device needs at
    /// least one row. A dimension that was cut unevenly cannot be cut again along other axes, but
    /// it can be cut along both at once.
    Balanced,
}

/// The distribution of a dimension over the groups along some axes: one step of a [`Cut`].
#[derive(Debug)]
struct DimSplit {
    set: AxisSet,
    groups: Arc<Groups>,
    /// The size before this cut, including the padding of earlier cuts.
    total: usize,
    parts: usize,
    uneven: Uneven,
}

/// The real rows of one shard, and the totals over all shards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RealRows {
    /// The dimension of the rows.
    pub(crate) dim: usize,
    /// The position of the first row in the full tensor.
    pub(crate) start: usize,
    pub(crate) len: usize,
    /// The size of the shard: real rows plus padding.
    pub(crate) padded: usize,
    pub(crate) total: usize,
    pub(crate) parts: usize,
}

impl DimSplit {
    fn rank(&self, slot: usize) -> usize {
        self.groups.position(slot).rank
    }

    /// Returns the rows of a rank, given the number of real rows before the padding.
    fn range(&self, rank: usize, real: usize) -> Range<usize> {
        match self.uneven {
            Uneven::Pad => {
                let start = (rank * self.padded()).min(real);
                start..(start + self.padded()).min(real)
            }
            Uneven::Refuse | Uneven::Balanced => balanced(self.total, rank, self.parts),
        }
    }

    /// Returns the size of every shard after padding.
    fn padded(&self) -> usize {
        self.total.div_ceil(self.parts)
    }

    /// Returns the size of a rank's shard, including its padding.
    fn size(&self, rank: usize) -> usize {
        match self.uneven {
            Uneven::Pad => self.padded(),
            Uneven::Refuse | Uneven::Balanced => self.range(rank, self.total).len(),
        }
    }

    fn is_even(&self) -> bool {
        self.total.is_multiple_of(self.parts)
    }

    /// Returns true if a dimension of this size can be cut in this way.
    fn is_possible(&self) -> bool {
        self.is_even()
            || match self.uneven {
                Uneven::Refuse => false,
                Uneven::Pad => true,
                Uneven::Balanced => self.total >= self.parts,
            }
    }

    /// Returns the rows of a rank in dimension `dim` of a tensor: a view, or a copy if it is
    /// padded.
    fn cut(&self, tensor: &Tensor, dim: usize, rank: usize) -> candle_core::Result<Tensor> {
        let rows = self.range(rank, self.total);
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

/// The checked cuts of one argument: pairs of a dimension and its distribution along a set of axes.
/// A dimension may be cut again along other axes.
#[derive(Debug)]
pub(crate) struct Cut(Vec<(usize, DimSplit)>);

impl Cut {
    /// Resolves the cut of argument `index`.
    pub(crate) fn new(
        index: usize,
        input: &Tensor,
        spec: &ResolvedSpec,
        uneven: Uneven,
        topology: &Topology,
        faults: &mut FaultList,
    ) -> Self {
        let mut cut = Self(Vec::with_capacity(spec.len()));
        for &(set, treatment) in spec {
            // Other treatments of an argument are faults that `resolve` has recorded.
            let Treatment::Shard(dim) = treatment else { continue };
            let Some(dim) = faults.note(spec::find_dim(Side::In, index, dim, input)) else {
                continue;
            };
            let earlier = cut.cuts_in_dim(dim).last();
            // The size of all earlier shards of the dimension, if they have one size.
            let total = earlier.map_or(input.dims()[dim], DimSplit::padded);
            let groups = topology.groups(set);
            let rows = DimSplit { set, groups, total, parts: topology.size(set), uneven };
            if let Some(fault) = find_fault(index, input, dim, earlier, &rows) {
                faults.add(fault);
            }
            cut.0.push((dim, rows));
        }
        cut
    }

    /// Returns the cuts of a dimension, in order.
    fn cuts_in_dim(&self, dim: usize) -> impl Iterator<Item = &DimSplit> {
        self.0.iter().filter(move |(cut, _)| *cut == dim).map(|(_, rows)| rows)
    }

    pub(crate) fn is_uncut(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the real rows of a slot's shard in the first cut dimension, after all cuts of it;
    /// `None` if no dimension is cut.
    pub(crate) fn real_rows(&self, slot: usize) -> Option<RealRows> {
        let (dim, first) = self.0.first()?;
        let last = self.0.iter().rposition(|(cut, _)| cut == dim)?;
        let parts = self.cuts_in_dim(*dim).map(|rows| rows.parts).product();
        let real = self.real(last, slot);
        let last = &self.0[last].1;
        Some(RealRows {
            dim: *dim,
            start: real.start,
            len: real.len(),
            padded: last.size(last.rank(slot)),
            total: first.total,
            parts,
        })
    }

    /// Removes the padding of the cut along `set` from a slot's result, if it has any.
    pub(crate) fn trim(
        &self,
        result: &Tensor,
        dim: usize,
        set: AxisSet,
        slot: usize,
    ) -> candle_core::Result<Tensor> {
        for (number, (_, rows)) in self.0.iter().enumerate() {
            let size = result.dims()[dim];
            if rows.set == set && rows.uneven == Uneven::Pad && size == rows.padded() {
                return result.narrow(dim, 0, self.real(number, slot).len());
            }
        }
        Ok(result.clone())
    }

    /// Returns the rows of the full tensor that a slot has, without padding, after cut number
    /// `number` and all earlier cuts of the same dimension.
    fn real(&self, number: usize, slot: usize) -> Range<usize> {
        let (dim, rows) = &self.0[number];
        let parent = match self.0[..number].iter().rposition(|(cut, _)| cut == dim) {
            Some(earlier) => self.real(earlier, slot),
            None => 0..rows.total,
        };
        let local = rows.range(rows.rank(slot), parent.len());
        parent.start + local.start..parent.start + local.end
    }

    /// Returns the shard of a slot.
    pub(crate) fn view(&self, input: &Tensor, slot: usize) -> candle_core::Result<Tensor> {
        self.0
            .iter()
            .try_fold(input.clone(), |shard, (dim, rows)| rows.cut(&shard, *dim, rows.rank(slot)))
    }
}

/// Returns the reason why a dimension cannot be cut in this way after the cut `earlier`.
fn find_fault(
    index: usize,
    input: &Tensor,
    dim: usize,
    earlier: Option<&DimSplit>,
    rows: &DimSplit,
) -> Option<SpecFault> {
    let DimSplit { total: size, parts, .. } = *rows;
    let shape = input.dims().to_vec();
    match earlier {
        // The earlier cut has recorded the fault.
        Some(earlier) if !earlier.is_possible() => None,
        // Balanced shards of different sizes cannot all be cut in the same way.
        Some(earlier) if !earlier.is_even() && rows.uneven != Uneven::Pad => {
            Some(SpecFault::CutAfterUneven {
                index,
                dim,
                size: earlier.total,
                shape,
                parts: earlier.parts,
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
