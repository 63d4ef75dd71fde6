//! Putting the results of replicas together.

use candle_core::{Device, Tensor};

use crate::{
    error::{Error, Result},
    mesh::topology::Topology,
    spec::{
        self, Resolved, Treatment,
        cut::Rows,
        fault::{Side, SpecFault},
    },
};

/// Where the results of a call come from and go to.
pub(crate) struct Join<'a> {
    pub(crate) topology: &'a Topology,
    /// The device of joined results.
    pub(crate) home: &'a Device,
    pub(crate) rows: Option<Rows>,
}

impl Join<'_> {
    /// One tensor on `home` of result number `index` of all slots.
    pub(crate) fn join(
        &self,
        index: usize,
        results: Vec<Tensor>,
        spec: &Resolved,
    ) -> Result<Tensor> {
        let mut joined =
            self.one_of_each_replicated(index, results.into_iter().enumerate().collect(), spec)?;
        // Backward: what was cut last is put together first.
        for &(set, treatment) in spec.iter().rev() {
            let groups = self.topology.groups(set);
            let mut of_groups: Vec<Vec<(usize, Tensor)>> = vec![Vec::new(); groups.len()];
            for (slot, tensor) in joined {
                of_groups[groups.seat(slot).0].push((slot, tensor));
            }
            let of_groups = of_groups.into_iter().filter(|group| !group.is_empty());
            let combined = of_groups.map(|group| {
                let parts = group
                    .iter()
                    .map(|(slot, tensor)| self.part(index, *slot, tensor, set, treatment));
                let parts = parts.collect::<Result<Vec<Tensor>>>()?;
                Ok((group[0].0, combine(index, &parts, treatment)?))
            });
            joined = combined.collect::<Result<_>>()?;
        }
        let (_, result) = joined.swap_remove(0);
        result.to_device(self.home).map_err(|source| Error::Gather { index, source })
    }

    /// Writes result number `index` of all slots into `kept`, a contiguous tensor of the joined
    /// shape.
    pub(crate) fn join_into(
        &self,
        index: usize,
        results: Vec<Tensor>,
        spec: &Resolved,
        kept: &Tensor,
    ) -> Result<()> {
        let failed = |source| Error::Gather { index, source };
        let (dim, parts) = match spec[..] {
            [(set, treatment @ Treatment::Shard(dim))] => {
                let dim =
                    spec::find_dim(Side::Out, index, dim, &results[0]).map_err(Error::from)?;
                let one_of_each = self.one_of_each_replicated(
                    index,
                    results.into_iter().enumerate().collect(),
                    spec,
                )?;
                let parts = one_of_each
                    .iter()
                    .map(|(slot, part)| self.part(index, *slot, part, set, treatment));
                (dim, parts.collect::<Result<Vec<_>>>()?)
            }
            _ => (0, vec![self.join(index, results, spec)?]),
        };
        let mut offset = 0;
        for part in parts {
            // In candle only the written part must fit; here it must fill.
            kept.slice_set(&part.contiguous().map_err(failed)?, dim, offset).map_err(failed)?;
            offset += part.dims().get(dim).copied().unwrap_or(1);
        }
        if offset == kept.dims().get(dim).copied().unwrap_or(1) {
            return Ok(());
        }
        let (size, shape) = (offset, kept.dims().to_vec());
        Err(SpecFault::KeptSize { index, dim, size, shape }.into())
    }

    /// The results of the first slot along each axis that `spec` does not name.
    fn one_of_each_replicated(
        &self,
        index: usize,
        results: Vec<(usize, Tensor)>,
        spec: &Resolved,
    ) -> Result<Vec<(usize, Tensor)>> {
        let named = spec.iter().fold(0, |named, (set, _)| named | set);
        let replicated = self.topology.groups(self.topology.set(&crate::ALL)? & !named);
        if cfg!(debug_assertions) {
            for (slot, tensor) in &results {
                let first = replicated.members_with(*slot)[0];
                if first != *slot
                    && !same(&results[first].1, tensor)
                        .map_err(|source| Error::Gather { index, source })?
                {
                    return Err(Error::NotReplicated { index, replica: *slot, first });
                }
            }
        }
        Ok(results.into_iter().filter(|(slot, _)| replicated.seat(*slot).1 == 0).collect())
    }

    /// What one slot adds to a joined result, on the home device.
    fn part(
        &self,
        index: usize,
        slot: usize,
        tensor: &Tensor,
        set: u64,
        treatment: Treatment,
    ) -> Result<Tensor> {
        let failed = |source| Error::Gather { index, source };
        let tensor = tensor.to_device(self.home).map_err(failed)?;
        match (treatment, self.rows) {
            (Treatment::Shard(dim), Some(rows)) if rows.set == set => {
                let dim = spec::find_dim(Side::Out, index, dim, &tensor).map_err(Error::from)?;
                rows.trim(&tensor, dim, self.topology.groups(set).seat(slot).1).map_err(failed)
            }
            _ => Ok(tensor),
        }
    }
}

fn combine(index: usize, parts: &[Tensor], treatment: Treatment) -> Result<Tensor> {
    let failed = |source| Error::Gather { index, source };
    let first = &parts[0];
    match treatment {
        Treatment::Shard(dim) => {
            let dim = spec::find_dim(Side::Out, index, dim, first).map_err(Error::from)?;
            Tensor::cat(parts, dim).map_err(failed)
        }
        Treatment::Stack(dim) => {
            let out_of_range = || SpecFault::DimOutOfRange {
                side: Side::Out,
                index,
                dim,
                shape: first.dims().to_vec(),
            };
            let dim = spec::normalize(dim, first.rank() + 1).ok_or_else(out_of_range)?;
            Tensor::stack(parts, dim).map_err(failed)
        }
        Treatment::Sum => sum(parts).map_err(failed),
        Treatment::Mean if !first.dtype().is_float() => {
            Err(SpecFault::MeanOfIntegers { index, dtype: first.dtype() }.into())
        }
        Treatment::Mean => sum(parts).and_then(|sum| sum / parts.len() as f64).map_err(failed),
    }
}

/// Adds up in the order of the mesh, so that rounding does not depend on which replica finished
/// first.
fn sum(parts: &[Tensor]) -> candle_core::Result<Tensor> {
    parts[1..].iter().try_fold(parts[0].clone(), |sum, part| sum + part)
}

/// Whether two tensors are equal to the bit, wherever they lie.
pub(crate) fn same(left: &Tensor, right: &Tensor) -> candle_core::Result<bool> {
    if left.shape() != right.shape() || left.dtype() != right.dtype() {
        return Ok(false);
    }
    Ok(left.id() == right.id() || bytes(left)? == bytes(right)?)
}

fn bytes(tensor: &Tensor) -> candle_core::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // Views of nothing may begin behind the end, where candle panics.
    tensor.force_contiguous()?.write_bytes(&mut bytes)?;
    Ok(bytes)
}
