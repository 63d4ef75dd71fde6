//! How arguments are cut: row by row, a shard is a list of the rows that are in it.

use pmap_mesh::Uneven;

use crate::differential::{
    array::Array,
    grid::{Axes, Grid, sorted},
    op::dim_index,
    spec::{self, Fault, Spec, Treatment},
};

/// The rows of a dimension in a shard; `None` is padding.
type Rows = Vec<Option<usize>>;

/// One argument, cut.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    /// The shape of the argument.
    shape: Vec<usize>,
    /// For each slot the rows of every dimension.
    shards: Vec<Vec<Rows>>,
    /// In order, what was cut.
    steps: Vec<Part>,
}

/// A cut of a dimension along some axes.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    dim: usize,
    pub(crate) axes: Axes,
    parts: usize,
    /// The size that padded shards have.
    pub(crate) padded: Option<usize>,
    /// For each slot how many rows of its shard are real.
    pub(crate) real: Vec<usize>,
}

impl Cut {
    pub(crate) fn new(
        grid: &Grid,
        shape: &[usize],
        spec: &Spec,
        uneven: Uneven,
    ) -> Result<Self, Fault> {
        if let Some(fault) = spec::axes_fault(grid, spec, true) {
            return Err(fault);
        }
        let whole: Vec<Rows> = shape.iter().map(|&size| (0..size).map(Some).collect()).collect();
        let shards = vec![whole; grid.slots()];
        let mut cut = Self { shape: shape.to_vec(), shards, steps: Vec::new() };
        for (axes, treatment) in spec {
            if let Treatment::Shard(dim) = treatment {
                let dim = dim_index(*dim, shape.len()).ok_or(Fault::DimOutOfRange)?;
                cut.part(grid, dim, axes, uneven)?;
            }
        }
        Ok(cut)
    }

    fn part(&mut self, grid: &Grid, dim: usize, axes: &Axes, uneven: Uneven) -> Result<(), Fault> {
        let parts = grid.size(axes);
        let sizes: Vec<usize> = self.shards.iter().map(|shard| shard[dim].len()).collect();
        if sizes.iter().any(|size| *size != sizes[0]) {
            return Err(Fault::CutAfterUneven);
        }
        let size = sizes[0];
        let is_possible = size.is_multiple_of(parts)
            || uneven == Uneven::Pad
            || uneven == Uneven::Balanced && size >= parts;
        if !is_possible {
            return Err(Fault::NotDivisible);
        }
        for slot in 0..grid.slots() {
            let rows = &mut self.shards[slot][dim];
            *rows = share(rows, grid.rank(axes, slot), parts, uneven);
        }
        self.steps.push(Part {
            dim,
            axes: sorted(axes),
            parts,
            padded: (uneven == Uneven::Pad).then(|| size.div_ceil(parts)),
            real: self.shards.iter().map(|shard| shard[dim].iter().flatten().count()).collect(),
        });
        Ok(())
    }

    pub(crate) fn is_cut(&self) -> bool {
        !self.steps.is_empty()
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

    /// The real rows of the dimension that is cut first, and the shard's weight.
    pub(crate) fn valid(&self, slot: usize) -> Option<(usize, f64)> {
        let dim = self.steps.first()?.dim;
        let steps = || self.steps.iter().filter(|step| step.dim == dim);
        let len = steps().next_back()?.real[slot];
        let parts: usize = steps().map(|step| step.parts).product();
        let total = self.shape[dim];
        let weight = if total == 0 { 1.0 } else { (len * parts) as f64 / total as f64 };
        Some((len, weight))
    }

    /// The cut along `axes`.
    pub(crate) fn parts_along(&self, axes: &Axes) -> impl Iterator<Item = &Part> {
        let axes = sorted(axes);
        self.steps.iter().filter(move |part| part.axes == axes)
    }
}

/// The rows that a rank gets.
fn share(rows: &Rows, rank: usize, parts: usize, uneven: Uneven) -> Rows {
    if uneven == Uneven::Pad {
        let size = rows.len().div_ceil(parts);
        return (rank * size..(rank + 1) * size).map(|n| *rows.get(n)?).collect();
    }
    // The first ones get one row more.
    let larger = rows.len() % parts;
    let size = |rank: usize| rows.len() / parts + usize::from(rank < larger);
    let start: usize = (0..rank).map(size).sum();
    rows[start..start + size(rank)].to_vec()
}
