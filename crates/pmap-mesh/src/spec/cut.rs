//! The cuts of arguments into shards.

use std::{ops::Range, sync::Arc};

use candle_core::Tensor;

use crate::{
    axes::AxisSet,
    error::fault::{Side, SpecFault},
    grid::{Groups, Topology},
    reduce::parts::balanced,
    spec::{self, FaultList, ResolvedSpec, Treatment},
};

/// The treatment of a dimension whose size is not divisible by the number of devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Uneven {
    /// The call fails; the default, as in JAX.
    #[default]
    Refuse,
    /// All shards have the same size; the last shards are padded with zeros.
    ///
    /// [`P::shard`](crate::P::shard) trims the padding of a result if it is joined along the axes
    /// of the cut and has the size of a padded shard in the joined dimension. Nothing else
    /// distinguishes a padded result, so join a result that has this size by chance with
    /// [`P::concat`](crate::P::concat), which trims nothing.
    Pad,
    /// The sizes of shards differ by at most one; the first shards are larger. Every device needs
    /// at least one row. If the shards differ in size, the dimension cannot be cut a second time
    /// along other axes; cut it once along all of these axes instead.
    Balanced,
}

/// The division of a dimension among the slots along some axes: one step of [`ArgumentCuts`].
#[derive(Debug)]
struct DimSplit {
    axes: AxisSet,
    groups: Arc<Groups>,
    /// The size of the dimension before this cut, including the padding of earlier cuts.
    total: usize,
    /// The number of shards.
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
    /// The number of real rows.
    pub(crate) len: usize,
    /// The size of the shard: real rows plus padding.
    pub(crate) padded_len: usize,
    /// The number of rows of the full tensor.
    pub(crate) total: usize,
    /// The number of shards.
    pub(crate) parts: usize,
}

impl DimSplit {
    /// Returns the index of the slot's shard.
    fn rank(&self, slot: usize) -> usize {
        self.groups.position(slot).rank
    }

    /// Returns the real rows of a rank, if only the first `n_real` rows of the dimension are real
    /// and the other rows are padding of an earlier cut.
    fn range(&self, rank: usize, n_real: usize) -> Range<usize> {
        match self.uneven {
            Uneven::Pad => {
                let start = (rank * self.padded_len()).min(n_real);
                start..(start + self.padded_len()).min(n_real)
            }
            // There is no padding before such a cut, so all rows are real.
            Uneven::Refuse | Uneven::Balanced => balanced(self.total, rank, self.parts),
        }
    }

    /// Returns the size of every shard after padding.
    fn padded_len(&self) -> usize {
        self.total.div_ceil(self.parts)
    }

    /// Returns the size of a rank's shard, including its padding.
    fn size(&self, rank: usize) -> usize {
        match self.uneven {
            Uneven::Pad => self.padded_len(),
            Uneven::Refuse | Uneven::Balanced => self.range(rank, self.total).len(),
        }
    }

    fn is_even(&self) -> bool {
        self.total.is_multiple_of(self.parts)
    }

    /// Returns true if the size of the dimension allows this cut.
    fn is_possible(&self) -> bool {
        self.is_even()
            || match self.uneven {
                Uneven::Refuse => false,
                Uneven::Pad => true,
                Uneven::Balanced => self.total >= self.parts,
            }
    }

    /// Returns the rows of a rank in dimension `dim` of a tensor: a view, or a copy if the shard is
    /// padded.
    fn narrow(&self, tensor: &Tensor, dim: usize, rank: usize) -> candle_core::Result<Tensor> {
        let rows = self.range(rank, self.total);
        match self.uneven {
            Uneven::Pad if rows.is_empty() || tensor.elem_count() == 0 => {
                zeros(tensor, dim, self.padded_len())
            }
            Uneven::Pad => tensor.narrow(dim, rows.start, rows.len())?.pad_with_zeros(
                dim,
                0,
                self.padded_len() - rows.len(),
            ),
            Uneven::Refuse | Uneven::Balanced => tensor.narrow(dim, rows.start, rows.len()),
        }
    }
}

/// The checked cuts of one argument.
#[derive(Debug)]
pub(crate) struct ArgumentCuts {
    /// Pairs of a dimension and its division along a set of axes, in order. A dimension may be cut
    /// again along other axes.
    splits: Vec<(usize, DimSplit)>,
    /// The place of this process's argument in the whole argument, if each process has its own part.
    local: Option<LocalPart>,
}

/// The place of a process's part in an argument that is spread over the processes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalPart {
    /// The first slot of the process.
    pub(crate) first_slot: usize,
    /// The number of slots of all processes.
    pub(crate) n_slots: usize,
    /// The number of rows in earlier processes.
    pub(crate) start: usize,
    /// The number of rows in all processes.
    pub(crate) total: usize,
}

impl ArgumentCuts {
    /// Plans the cuts of argument number `index`, and adds faults to `faults`.
    pub(crate) fn new(
        index: usize,
        input: &Tensor,
        spec: &ResolvedSpec,
        uneven: Uneven,
        topology: &Topology,
        faults: &mut FaultList,
    ) -> Self {
        let mut cuts = Self { splits: Vec::with_capacity(spec.len()), local: None };
        for &(axes, treatment) in spec {
            // Other treatments of an argument are faults that `resolve` has recorded.
            let Treatment::Shard(dim) = treatment else { continue };
            let Some(dim) = faults.note(spec::find_dim(Side::In, index, dim, input)) else {
                continue;
            };
            let earlier = cuts.splits_of_dim(dim).last();
            // If the shards of the earlier cut differ in size, a fault is recorded.
            let total = earlier.map_or(input.dims()[dim], DimSplit::padded_len);
            let groups = topology.groups(axes);
            let split = DimSplit { axes, groups, total, parts: topology.size(axes), uneven };
            if let Some(fault) = find_fault(index, input, dim, earlier, &split) {
                faults.add(fault);
            }
            cuts.splits.push((dim, split));
        }
        cuts
    }

    /// Returns these cuts for a process's part of an argument. Slots then count from 0 in
    /// [`shard`](Self::shard), and over all processes in [`real_rows`](Self::real_rows).
    pub(crate) fn with_local_part(self, part: LocalPart) -> Self {
        Self { local: Some(part), ..self }
    }

    /// Returns the size of the dimension that is cut first; 0 if no dimension is cut.
    pub(crate) fn n_rows(&self) -> usize {
        self.splits.first().map_or(0, |(_, split)| split.total)
    }

    /// Returns the cuts of a dimension, in order.
    fn splits_of_dim(&self, dim: usize) -> impl Iterator<Item = &DimSplit> {
        self.splits.iter().filter(move |(cut_dim, _)| *cut_dim == dim).map(|(_, split)| split)
    }

    /// Returns true if no dimension is cut.
    pub(crate) fn is_uncut(&self) -> bool {
        self.splits.is_empty()
    }

    /// Returns the real rows of a slot's shard in the dimension that is cut first, after all cuts
    /// of this dimension; `None` if no dimension is cut.
    pub(crate) fn real_rows(&self, slot: usize) -> Option<RealRows> {
        let (dim, first_split) = self.splits.first()?;
        let last = self.splits.iter().rposition(|(cut_dim, _)| cut_dim == dim)?;
        let parts = self.splits_of_dim(*dim).map(|split| split.parts).product();
        let whole = LocalPart { first_slot: 0, n_slots: parts, start: 0, total: first_split.total };
        let LocalPart { first_slot, n_slots, start, total } = self.local.unwrap_or(whole);
        let slot = slot - first_slot;
        let rows = self.rows_after(last, slot);
        let last_split = &self.splits[last].1;
        Some(RealRows {
            dim: *dim,
            start: start + rows.start,
            len: rows.len(),
            padded_len: last_split.size(last_split.rank(slot)),
            total,
            parts: n_slots,
        })
    }

    /// Removes the padding of the cut along `axes` from a slot's result, if it has any.
    pub(crate) fn trim(
        &self,
        result: &Tensor,
        dim: usize,
        axes: AxisSet,
        slot: usize,
    ) -> candle_core::Result<Tensor> {
        if self.local.is_some() {
            // A result of all slots has no padding that these cuts know.
            return Ok(result.clone());
        }
        let size = result.dims()[dim];
        for (number, (_, split)) in self.splits.iter().enumerate() {
            if split.axes == axes && split.uneven == Uneven::Pad && size == split.padded_len() {
                return result.narrow(dim, 0, self.rows_after(number, slot).len());
            }
        }
        Ok(result.clone())
    }

    /// Returns the rows of the full tensor that a slot has after cut number `number` and all
    /// earlier cuts of the same dimension, without padding.
    fn rows_after(&self, number: usize, slot: usize) -> Range<usize> {
        let (dim, split) = &self.splits[number];
        let parent = match self.splits[..number].iter().rposition(|(cut_dim, _)| cut_dim == dim) {
            Some(earlier) => self.rows_after(earlier, slot),
            None => 0..split.total,
        };
        let within_parent = split.range(split.rank(slot), parent.len());
        parent.start + within_parent.start..parent.start + within_parent.end
    }

    /// Returns the shard of a slot.
    pub(crate) fn shard(&self, input: &Tensor, slot: usize) -> candle_core::Result<Tensor> {
        let mut shard = input.clone();
        for (dim, split) in &self.splits {
            shard = split.narrow(&shard, *dim, split.rank(slot))?;
        }
        Ok(shard)
    }
}

/// Returns the reason why `split` is not possible after the cut `earlier` of the same dimension, if
/// any.
fn find_fault(
    index: usize,
    input: &Tensor,
    dim: usize,
    earlier: Option<&DimSplit>,
    split: &DimSplit,
) -> Option<SpecFault> {
    let shape = input.dims();
    match earlier {
        // The earlier cut has recorded the fault.
        Some(earlier) if !earlier.is_possible() => None,
        // Balanced shards of different sizes cannot all be cut in one way.
        Some(DimSplit { total, parts, .. })
            if !total.is_multiple_of(*parts) && split.uneven != Uneven::Pad =>
        {
            Some(SpecFault(format!(
                "dimension {dim} of input {index} of shape {shape:?} is cut a second time, but its first cut of size \
                 {total} over {parts} devices is uneven; cut it along all axes at once, as `P::shard({dim}, [\"a\", \"b\"])`"
            )))
        }
        _ => (!split.is_possible())
            .then(|| SpecFault::not_divisible((index, dim), shape, split.total, split.parts)),
    }
}

/// Returns zeros with the shape of `like`, but with this size in dimension `dim`.
fn zeros(like: &Tensor, dim: usize, size: usize) -> candle_core::Result<Tensor> {
    let mut shape = like.dims().to_vec();
    shape[dim] = size;
    Tensor::zeros(shape, like.dtype(), like.device())
}
