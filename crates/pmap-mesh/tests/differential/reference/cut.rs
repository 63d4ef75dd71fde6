//! The shards of arguments: in each dimension a shard is a list of rows.

use pmap_mesh::Uneven;

use crate::differential::{
    array::Array,
    grid::{Axes, Grid, sorted},
    op::dim_index,
    spec::{self, Spec, SpecFaultKind, Treatment},
};

/// The rows of a dimension that are in a shard; `None` is padding.
type ShardRows = Vec<Option<usize>>;

/// An argument cut into shards.
#[derive(Clone, Debug)]
pub(crate) struct ShardedArgument {
    /// The shape of the argument.
    shape: Vec<usize>,
    /// By slot, then by dimension.
    shards: Vec<Vec<ShardRows>>,
    /// The cuts, in order.
    cuts: Vec<DimCut>,
}

/// A cut of a dimension along some axes.
#[derive(Clone, Debug)]
pub(crate) struct DimCut {
    dim: usize,
    pub(crate) axes: Axes,
    parts: usize,
    /// The size of padded shards, or `None` without padding.
    pub(crate) padded: Option<usize>,
    /// The number of real rows in the shard of each slot.
    pub(crate) real: Vec<usize>,
}

impl ShardedArgument {
    pub(crate) fn new(
        grid: &Grid,
        shape: &[usize],
        spec: &Spec,
        uneven: Uneven,
    ) -> Result<Self, SpecFaultKind> {
        if let Some(fault) = spec::axes_fault(grid, spec, true) {
            return Err(fault);
        }
        let whole: Vec<ShardRows> =
            shape.iter().map(|&size| (0..size).map(Some).collect()).collect();
        let shards = vec![whole; grid.slots()];
        let mut sharded = Self { shape: shape.to_vec(), shards, cuts: Vec::new() };
        for (axes, treatment) in spec {
            if let Treatment::Shard(dim) = treatment {
                let dim = dim_index(*dim, shape.len()).ok_or(SpecFaultKind::DimOutOfRange)?;
                sharded.cut(grid, dim, axes, uneven)?;
            }
        }
        Ok(sharded)
    }

    fn cut(
        &mut self,
        grid: &Grid,
        dim: usize,
        axes: &Axes,
        uneven: Uneven,
    ) -> Result<(), SpecFaultKind> {
        let parts = grid.size(axes);
        let sizes: Vec<usize> = self.shards.iter().map(|shard| shard[dim].len()).collect();
        if sizes.iter().any(|size| *size != sizes[0]) {
            return Err(SpecFaultKind::CutAfterUneven);
        }
        let size = sizes[0];
        let is_possible = size.is_multiple_of(parts)
            || uneven == Uneven::Pad
            || uneven == Uneven::Balanced && size >= parts;
        if !is_possible {
            return Err(SpecFaultKind::NotDivisible);
        }
        for slot in 0..grid.slots() {
            let rows = &mut self.shards[slot][dim];
            *rows = share(rows, grid.rank(axes, slot), parts, uneven);
        }
        self.cuts.push(DimCut {
            dim,
            axes: sorted(axes),
            parts,
            padded: (uneven == Uneven::Pad).then(|| size.div_ceil(parts)),
            real: self.shards.iter().map(|shard| shard[dim].iter().flatten().count()).collect(),
        });
        Ok(())
    }

    pub(crate) fn is_cut(&self) -> bool {
        !self.cuts.is_empty()
    }

    pub(crate) fn shard(&self, array: &Array, slot: usize) -> Array {
        let rows = &self.shards[slot];
        let shape: Vec<usize> = rows.iter().map(Vec::len).collect();
        Array::from_fn(array.dtype, &shape, |place| {
            for (n, rows) in place.iter_mut().zip(rows) {
                match rows[*n] {
                    Some(row) => *n = row,
                    None => return 0,
                }
            }
            array.at(place)
        })
    }

    /// Returns the number of real rows in the first dimension that was cut, and the shard's weight.
    pub(crate) fn valid(&self, slot: usize) -> Option<(usize, f64)> {
        let dim = self.cuts.first()?.dim;
        let cuts = || self.cuts.iter().filter(|cut| cut.dim == dim);
        let len = cuts().next_back()?.real[slot];
        let parts: usize = cuts().map(|cut| cut.parts).product();
        let total = self.shape[dim];
        let weight = if total == 0 { 1.0 } else { (len * parts) as f64 / total as f64 };
        Some((len, weight))
    }

    /// Returns the cuts along `axes`.
    pub(crate) fn cuts_along(&self, axes: &Axes) -> impl Iterator<Item = &DimCut> {
        let axes = sorted(axes);
        self.cuts.iter().filter(move |cut| cut.axes == axes)
    }
}

/// Returns the rows of a rank's shard.
fn share(rows: &ShardRows, rank: usize, parts: usize, uneven: Uneven) -> ShardRows {
    if uneven == Uneven::Pad {
        let size = rows.len().div_ceil(parts);
        return (rank * size..(rank + 1) * size).map(|n| *rows.get(n)?).collect();
    }
    // The first ranks get one row more.
    let larger = rows.len() % parts;
    let size = |rank: usize| rows.len() / parts + usize::from(rank < larger);
    let start: usize = (0..rank).map(size).sum();
    rows[start..start + size(rank)].to_vec()
}
