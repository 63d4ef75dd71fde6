//! How results are put together.

use crate::differential::{
    array::Array,
    bits::Fold,
    grid::{Axes, Grid},
    op::dim_index,
    reference::{Refusal, cut::Cut, has_sum},
    spec::{Fault, Spec, Treatment},
};

/// One result, put together.
pub(crate) struct Joined<'a> {
    pub(crate) grid: &'a Grid,
    /// The cut of the first argument that is cut.
    pub(crate) cut: Option<&'a Cut>,
    pub(crate) index: usize,
}

impl Joined<'_> {
    pub(crate) fn result(&self, per_slot: Vec<Array>, spec: &Spec) -> Result<Array, Refusal> {
        let named: Axes = spec.iter().flat_map(|(axes, _)| axes.clone()).collect();
        let replicated = self.grid.others(&named);
        let first = |slot: usize| self.grid.members(&replicated, slot)[0];
        if (0..per_slot.len()).any(|slot| !per_slot[slot].same(&per_slot[first(slot)])) {
            return Err(Refusal::NotReplicated(self.index));
        }
        let mut parts: Vec<(usize, Array)> = per_slot.into_iter().enumerate().collect();
        parts.retain(|(slot, _)| first(*slot) == *slot);
        for (axes, treatment) in spec.iter().rev() {
            parts = self.join_axes(axes, *treatment, &parts)?;
        }
        let (_, result) = parts.swap_remove(0);
        Ok(result)
    }

    /// One array for each group, with its first slot.
    fn join_axes(
        &self,
        axes: &Axes,
        treatment: Treatment,
        parts: &[(usize, Array)],
    ) -> Result<Vec<(usize, Array)>, Refusal> {
        let mut joined = Vec::new();
        for &(first, _) in parts.iter().filter(|(slot, _)| self.grid.rank(axes, *slot) == 0) {
            let members = self.grid.members(axes, first);
            let of_members = parts.iter().filter(|(slot, _)| members.contains(slot));
            let trimmed: Vec<Array> = of_members
                .map(|(slot, array)| self.trimmed(axes, treatment, *slot, array))
                .collect::<Result<_, _>>()?;
            joined.push((first, self.combined(treatment, &trimmed.iter().collect::<Vec<_>>())?));
        }
        Ok(joined)
    }

    /// Without padding, if the array has that of a shard along these axes.
    fn trimmed(
        &self,
        axes: &Axes,
        treatment: Treatment,
        slot: usize,
        array: &Array,
    ) -> Result<Array, Refusal> {
        let Treatment::Shard(dim) = treatment else { return Ok(array.clone()) };
        let dim = self.dim(dim, array.shape.len())?;
        let mut parts = self.cut.into_iter().flat_map(|cut| cut.parts_along(axes));
        Ok(match parts.find(|part| part.padded == Some(array.shape[dim])) {
            Some(part) => array.rows(dim, 0, part.real[slot]),
            None => array.clone(),
        })
    }

    fn combined(&self, treatment: Treatment, parts: &[&Array]) -> Result<Array, Refusal> {
        let (first, index) = (parts[0], self.index);
        let rank = first.shape.len();
        let folded = |fold: Fold| {
            let fits = parts.iter().all(|part| part.agrees(first)) && has_sum(first.dtype);
            fits.then(|| Array::folded(parts, fold))
        };
        let combined = match treatment {
            Treatment::Shard(dim) | Treatment::Concat(dim) => {
                Array::concatenated(parts, self.dim(dim, rank)?)
            }
            Treatment::Stack(dim) => {
                let dim = self.dim(dim, rank + 1)?;
                let parts: Vec<Array> =
                    parts.iter().map(|part| (*part).clone().with_dim(dim)).collect();
                Array::stacked(&parts, dim)
            }
            Treatment::Sum => folded(Fold::Sum),
            Treatment::Mean if !first.dtype.is_float() => {
                return Err(Refusal::Specs(vec![(index, Fault::MeanOfIntegers)]));
            }
            Treatment::Mean => folded(Fold::Mean),
        };
        combined.ok_or(Refusal::Gather(index))
    }

    fn dim(&self, dim: isize, rank: usize) -> Result<usize, Refusal> {
        dim_index(dim, rank).ok_or(Refusal::Specs(vec![(self.index, Fault::DimOutOfRange)]))
    }
}
