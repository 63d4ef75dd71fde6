//! Putting the results of replicas together.

use candle_core::{Device, Tensor, bail};
use core_types::Fingerprint;

use crate::{
    axes::{ALL, AxisSet},
    device::to_device::{copied, in_one_piece, moved, on_host},
    error::{
        Error, Result, ValueError,
        fault::{Side, SpecFault},
    },
    grid::{Groups, Topology},
    reduce::{self, Reduction},
    spec::{self, Resolved, Treatment, cut::Cut},
};

/// Where the results of a call come from and go to.
pub(crate) struct Join<'a> {
    pub(crate) topology: &'a Topology,
    /// The device of joined results.
    pub(crate) home: &'a Device,
    /// How the first argument was cut that was.
    pub(crate) cut: Option<&'a Cut>,
    pub(crate) comparison: Comparison,
}

/// How results that are said to be replicated are compared, before they are taken from the first
/// slot.
pub(crate) enum Comparison {
    /// Not at all.
    Trusted,
    /// All their bits.
    Bits,
    /// The [`fingerprint`] of each, by slot and number: all slots' results are not in one process.
    Fingerprints(Vec<Vec<u64>>),
}

impl Join<'_> {
    /// One tensor on `home` of result number `index` of all slots.
    pub(crate) fn join(
        &self,
        index: usize,
        results: Vec<Tensor>,
        spec: &Resolved,
    ) -> Result<Tensor> {
        let mut joined = self.one_of_each_replicated(index, results, spec)?;
        // Backward: what was cut last is put together first.
        for &(set, treatment) in spec.iter().rev() {
            joined = self.join_along(index, &joined, set, treatment)?;
        }
        let (_, result) = joined.swap_remove(0);
        moved(&result, self.home).map_err(Error::gather(index))
    }

    /// One tensor for each group along `set`, with its first slot.
    fn join_along(
        &self,
        index: usize,
        results: &[(usize, Tensor)],
        set: AxisSet,
        treatment: Treatment,
    ) -> Result<Vec<(usize, Tensor)>> {
        let groups = self.topology.groups(set);
        let mut parts: Vec<Vec<Tensor>> = vec![Vec::new(); groups.len()];
        let mut firsts = Vec::new();
        for (slot, tensor) in results {
            let part = self.part(index, *slot, tensor, set, treatment)?;
            let group = groups.place(*slot).group;
            if parts[group].is_empty() {
                firsts.push((*slot, group));
            }
            parts[group].push(part);
        }
        firsts
            .into_iter()
            .map(|(first, group)| Ok((first, combine(index, &parts[group], treatment)?)))
            .collect()
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
        match spec[..] {
            // Shards are written one by one, without a tensor of them all.
            [(set, treatment @ (Treatment::Shard(dim) | Treatment::Concat(dim)))] => {
                let dim = spec::find_dim(Side::Out, index, dim, &results[0])?;
                let shards = self.one_of_each_replicated(index, results, spec)?;
                let parts: Result<Vec<Tensor>> = shards
                    .iter()
                    .map(|(slot, shard)| self.part(index, *slot, shard, set, treatment))
                    .collect();
                write_into(kept, index, dim, &parts?)
            }
            _ => write_into(kept, index, 0, &[self.join(index, results, spec)?]),
        }
    }

    /// The results of the first slot along each axis that `spec` does not name.
    fn one_of_each_replicated(
        &self,
        index: usize,
        results: Vec<Tensor>,
        spec: &Resolved,
    ) -> Result<Vec<(usize, Tensor)>> {
        let replicated = replicated_axes(spec, self.topology)?;
        if replicated == 0 {
            return Ok(results.into_iter().enumerate().collect());
        }
        let replicated = self.topology.groups(replicated);
        self.check_replicated(index, &results, &replicated)?;
        let results = results.into_iter().enumerate();
        Ok(results.filter(|(slot, _)| replicated.place(*slot).rank == 0).collect())
    }

    /// Checks that the members of each group have the same result.
    fn check_replicated(&self, index: usize, results: &[Tensor], groups: &Groups) -> Result<()> {
        let are_same = |first: usize, slot: usize| match &self.comparison {
            Comparison::Trusted => Ok(true),
            Comparison::Bits => same(&results[first], &results[slot]),
            Comparison::Fingerprints(prints) => Ok(prints[first][index] == prints[slot][index]),
        };
        for slot in 0..results.len() {
            let first = groups.members_with(slot)[0];
            if first != slot && !are_same(first, slot).map_err(Error::gather(index))? {
                return Err(ValueError::NotReplicated { index, slot, first }.into());
            }
        }
        Ok(())
    }

    /// What one slot adds to a joined result, on the home device.
    fn part(
        &self,
        index: usize,
        slot: usize,
        tensor: &Tensor,
        set: AxisSet,
        treatment: Treatment,
    ) -> Result<Tensor> {
        let tensor = moved(tensor, self.home).map_err(Error::gather(index))?;
        match (treatment, self.cut) {
            (Treatment::Shard(dim), Some(cut)) => {
                let dim = spec::find_dim(Side::Out, index, dim, &tensor)?;
                cut.trim(&tensor, dim, set, slot).map_err(Error::gather(index))
            }
            _ => Ok(tensor),
        }
    }
}

/// The axes along which a result is the same, as none of them is named.
pub(crate) fn replicated_axes(spec: &Resolved, topology: &Topology) -> Result<AxisSet> {
    let named = spec.iter().fold(0, |named, (set, _)| named | set);
    Ok(topology.set(&ALL)? & !named)
}

/// Writes `parts` one after the other into `kept`, which they must fill.
fn write_into(kept: &Tensor, index: usize, dim: usize, parts: &[Tensor]) -> Result<()> {
    if let ([], [part]) = (kept.dims(), parts)
        && part.rank() == 0
    {
        // candle writes along a dimension, and a scalar has none.
        let row = |scalar: &Tensor| scalar.reshape(1).map_err(Error::gather(index));
        return write_into(&row(kept)?, index, 0, &[row(part)?]);
    }
    let mut size = 0;
    for part in parts {
        let part = in_one_piece(part).map_err(Error::gather(index))?;
        kept.slice_set(&part, dim, size).map_err(Error::gather(index))?;
        size += part.dims()[dim];
    }
    // candle only checks that there is room for each part.
    if size == kept.dims()[dim] {
        return Ok(());
    }
    Err(SpecFault::KeptSize { index, dim, size, shape: kept.dims().to_vec() }.into())
}

fn combine(index: usize, parts: &[Tensor], treatment: Treatment) -> Result<Tensor> {
    let first = &parts[0];
    let combined = match treatment {
        Treatment::Shard(dim) | Treatment::Concat(dim) => {
            Tensor::cat(parts, spec::find_dim(Side::Out, index, dim, first)?)
        }
        Treatment::Stack(dim) => {
            let shape = first.dims().to_vec();
            let out_of_range = SpecFault::DimOutOfRange { side: Side::Out, index, dim, shape };
            Tensor::stack(parts, spec::normalize(dim, first.rank() + 1).ok_or(out_of_range)?)
        }
        Treatment::Sum => reduced(parts, Reduction::Sum),
        Treatment::Mean if !first.dtype().is_float() => {
            return Err(SpecFault::MeanOfIntegers { index, dtype: first.dtype() }.into());
        }
        Treatment::Mean => reduced(parts, Reduction::Mean),
    };
    combined.map_err(Error::gather(index))
}

/// The reduction in the order of the mesh, by the kernel of the collectives: `P::sum` has the bits
/// of `psum`.
fn reduced(parts: &[Tensor], reduction: Reduction) -> candle_core::Result<Tensor> {
    let first = &parts[0];
    if let Some(other) = parts.iter().find(|part| part.shape() != first.shape()) {
        bail!("{:?} and {:?} cannot be added up", first.dims(), other.dims());
    }
    let on_host = parts.iter().map(on_host).collect::<candle_core::Result<Vec<_>>>()?;
    moved(&reduce::whole(&on_host, reduction)?, first.device())
}

/// Whether two tensors are equal to the bit, wherever they lie.
pub(crate) fn same(left: &Tensor, right: &Tensor) -> candle_core::Result<bool> {
    if left.shape() != right.shape() || left.dtype() != right.dtype() {
        return Ok(false);
    }
    if is_one_storage(left, right) {
        return Ok(true);
    }
    if reduce::has_kernel(left.dtype()) {
        reduce::same(&on_host(left)?, &on_host(right)?)
    } else {
        Ok(bytes(left)? == bytes(right)?)
    }
}

/// A number that differs if two tensors are not the [`same`], but for one pair in 2^64.
pub(crate) fn fingerprint(x: &Tensor) -> candle_core::Result<u64> {
    let mut fingerprint = Fingerprint::new();
    fingerprint.write_bytes(x.dtype().as_str().as_bytes()).write_u64(x.rank() as u64);
    fingerprint.extend(x.dims().iter().map(|&size| size as u64));
    if reduce::has_kernel(x.dtype()) {
        reduce::fingerprint(&on_host(x)?, &mut fingerprint)?;
    } else {
        fingerprint.write_bytes(&bytes(x)?);
    }
    Ok(fingerprint.finish())
}

/// Whether both look at the same items of one storage, as the results of a large `psum` do.
fn is_one_storage(left: &Tensor, right: &Tensor) -> bool {
    // One after the other: a thread that held one lock while it waits for the other could wait for
    // a `Var::set` that waits for this one.
    let address = |x: &Tensor| std::ptr::from_ref(&*x.storage_and_layout().0).addr();
    left.stride() == right.stride()
        && left.layout().start_offset() == right.layout().start_offset()
        && address(left) == address(right)
}

fn bytes(tensor: &Tensor) -> candle_core::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    copied(tensor)?.write_bytes(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    fn print(x: &Tensor) -> u64 {
        fingerprint(x).unwrap()
    }

    #[test]
    fn tensors_are_the_same_if_all_their_bits_are() {
        let zeros = |len: usize, dtype| Tensor::zeros(len, dtype, &Device::Cpu).unwrap();
        let dtypes = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::F8E4M3];
        let integers = [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64];
        for (dtype, len) in dtypes
            .into_iter()
            .chain(integers)
            .flat_map(|dtype| [1, 4097, 9000].map(|len| (dtype, len)))
        {
            let x = zeros(len, dtype);
            assert!(same(&x, &x).unwrap() && same(&x, &zeros(len, dtype)).unwrap());
            assert_eq!(print(&x), print(&zeros(len, dtype)));
            let one = Tensor::ones(1, DType::F32, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            // The first of the items that make one word of a fingerprint, and the last of all.
            for place in [0, len - 1] {
                let (before, after) = (zeros(place, dtype), zeros(len - 1 - place, dtype));
                let other = Tensor::cat(&[&before, &one, &after], 0).unwrap();
                assert!(!same(&x, &other).unwrap() && !same(&other, &x).unwrap(), "{dtype:?}");
                assert_ne!(print(&x), print(&other), "{dtype:?} {len} {place}");
            }
        }
        let column = zeros(2, DType::F32);
        for other in [zeros(2, DType::U32), column.reshape((1, 2)).unwrap()] {
            assert!(!same(&column, &other).unwrap());
            assert_ne!(print(&column), print(&other));
        }
    }

    #[test]
    fn bits_count_and_not_numbers() {
        let of = |x: f32| Tensor::new(x, &Device::Cpu).unwrap();
        assert!(same(&of(f32::NAN), &of(f32::NAN)).unwrap());
        assert!(!same(&of(0.0), &of(-0.0)).unwrap());
        assert_ne!(print(&of(0.0)), print(&of(-0.0)));
    }

    #[test]
    fn views_of_one_storage_are_compared_by_what_they_look_at() {
        let x = Tensor::new(&[1_f32, 2., 1., 3.], &Device::Cpu).unwrap();
        let at = |start| x.narrow(0, start, 1).unwrap();
        assert!(same(&at(0), &at(0)).unwrap() && same(&at(0), &at(2)).unwrap());
        assert!(!same(&at(0), &at(1)).unwrap());
        assert_eq!([print(&at(0)), print(&at(1))], [print(&at(2)), print(&at(1))]);
        assert_ne!(print(&at(0)), print(&at(1)));
        let square = x.reshape((2, 2)).unwrap();
        assert!(!same(&square, &square.t().unwrap()).unwrap());
    }
}
