//! Joins the results of all slots according to their specs.

use crate::differential::{
    array::Array,
    grid::{Axes, Grid},
    op::dim_index,
    reference::{ResultError, cut::ShardedArgument},
    spec::{Spec, SpecFaultKind, Treatment},
};

/// The context in which the arrays of one result are joined.
pub(crate) struct ResultJoin<'a> {
    pub(crate) grid: &'a Grid,
    /// The first argument that is cut into shards, if any is.
    pub(crate) sharded: Option<&'a ShardedArgument>,
    /// The index of the result.
    pub(crate) index: usize,
}

impl ResultJoin<'_> {
    pub(crate) fn result(&self, per_slot: Vec<Array>, spec: &Spec) -> Result<Array, ResultError> {
        let named: Axes = spec.iter().flat_map(|(axes, _)| axes.clone()).collect();
        let replicated = self.grid.others(&named);
        let first = |slot: usize| self.grid.members(&replicated, slot)[0];
        if (0..per_slot.len()).any(|slot| !per_slot[slot].same(&per_slot[first(slot)])) {
            return Err(ResultError::NotReplicated(self.index));
        }
        let mut parts: Vec<(usize, Array)> = per_slot.into_iter().enumerate().collect();
        parts.retain(|(slot, _)| first(*slot) == *slot);
        for (axes, treatment) in spec.iter().rev() {
            parts = self.join_axes(axes, *treatment, &parts)?;
        }
        let (_, result) = parts.swap_remove(0);
        Ok(result)
    }

    /// Joins the arrays of each group, and returns each joined array with the group's first slot.
    fn join_axes(
        &self,
        axes: &Axes,
        treatment: Treatment,
        parts: &[(usize, Array)],
    ) -> Result<Vec<(usize, Array)>, ResultError> {
        let mut joined = Vec::new();
        for &(first, _) in parts.iter().filter(|(slot, _)| self.grid.rank(axes, *slot) == 0) {
            let members = self.grid.members(axes, first);
            let own = parts.iter().filter(|(slot, _)| members.contains(slot));
            let trimmed: Vec<Array> = own
                .map(|(slot, array)| self.trimmed(axes, treatment, *slot, array))
                .collect::<Result<_, _>>()?;
            joined.push((first, self.combined(treatment, &trimmed.iter().collect::<Vec<_>>())?));
        }
        Ok(joined)
    }

    /// Removes the padding of an array that has the padded size of a shard along these axes.
    fn trimmed(
        &self,
        axes: &Axes,
        treatment: Treatment,
        slot: usize,
        array: &Array,
    ) -> Result<Array, ResultError> {
        let Treatment::Shard(dim) = treatment else { return Ok(array.clone()) };
        let dim = self.dim(dim, array.shape.len())?;
        let mut cuts = self.sharded.into_iter().flat_map(|sharded| sharded.cuts_along(axes));
        Ok(match cuts.find(|cut| cut.padded == Some(array.shape[dim])) {
            Some(cut) => array.rows(dim, 0, cut.real[slot]),
            None => array.clone(),
        })
    }

    fn combined(&self, treatment: Treatment, parts: &[&Array]) -> Result<Array, ResultError> {
        let (first, index) = (parts[0], self.index);
        let rank = first.shape.len();
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
        };
        combined.ok_or(ResultError::Gather(index))
    }

    fn dim(&self, dim: isize, rank: usize) -> Result<usize, ResultError> {
        dim_index(dim, rank)
            .ok_or(ResultError::Specs(vec![(self.index, SpecFaultKind::DimOutOfRange)]))
    }
}
