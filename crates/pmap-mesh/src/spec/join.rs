//! Joins the results of replicas.

use candle_core::{Device, Tensor, bail};
use core_types::Fingerprint;

use crate::{
    axes::{ALL, AxisSet},
    device::to_device::{contiguous_copy, to_contiguous, to_device, to_host},
    error::{
        Error, Result, ValueError,
        fault::{Side, SpecFault},
    },
    grid::{Groups, Topology},
    reduce::{self, Reduction},
    spec::{self, ResolvedSpec, Treatment, cut::Cut},
};

/// The context in which results of a call are joined.
pub(crate) struct ResultJoin<'a> {
    pub(crate) topology: &'a Topology,
    /// The device of joined results.
    pub(crate) home: &'a Device,
    /// The cut of the first argument that was cut.
    pub(crate) cut: Option<&'a Cut>,
    pub(crate) comparison: Comparison,
}

/// The method that verifies that replicated results are equal, before the first slot's is returned.
pub(crate) enum Comparison {
    /// Skips the check.
    Trusted,
    /// Compares all bits.
    Bits,
    /// Compares the [`fingerprint`]s, by slot and result, because this process does not have the
    /// results of all slots.
    Fingerprints(Vec<Vec<u64>>),
}

impl ResultJoin<'_> {
    /// Joins result number `index` of all slots into one tensor on `home`.
    pub(crate) fn join(
        &self,
        index: usize,
        results: Vec<Tensor>,
        spec: &ResolvedSpec,
    ) -> Result<Tensor> {
        let mut joined = self.take_first_replicas(index, results, spec)?;
        // Undo the cuts in reverse order.
        for &(set, treatment) in spec.iter().rev() {
            joined = self.join_along(index, &joined, set, treatment)?;
        }
        let (_, result) = joined.swap_remove(0);
        to_device(&result, self.home).map_err(Error::gather(index))
    }

    /// Joins the results of each group along `set`. Returns pairs of a group's first slot and its
    /// tensor.
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
            let group = groups.position(*slot).group;
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

    /// Joins result number `index` of all slots into `kept`, a contiguous tensor of the joined
    /// shape.
    pub(crate) fn join_into(
        &self,
        index: usize,
        results: Vec<Tensor>,
        spec: &ResolvedSpec,
        kept: &Tensor,
    ) -> Result<()> {
        match spec[..] {
            // Write the shards one by one, without a temporary tensor for all of them.
            [(set, treatment @ (Treatment::Shard(dim) | Treatment::Concat(dim)))] => {
                let dim = spec::find_dim(Side::Out, index, dim, &results[0])?;
                let shards = self.take_first_replicas(index, results, spec)?;
                let parts: Result<Vec<Tensor>> = shards
                    .iter()
                    .map(|(slot, shard)| self.part(index, *slot, shard, set, treatment))
                    .collect();
                write_into(kept, index, dim, &parts?)
            }
            _ => write_into(kept, index, 0, &[self.join(index, results, spec)?]),
        }
    }

    /// Returns the results of the first slot along each axis that `spec` does not name.
    fn take_first_replicas(
        &self,
        index: usize,
        results: Vec<Tensor>,
        spec: &ResolvedSpec,
    ) -> Result<Vec<(usize, Tensor)>> {
        let replicated = replicated_axes(spec, self.topology)?;
        if replicated == 0 {
            return Ok(results.into_iter().enumerate().collect());
        }
        let replicated = self.topology.groups(replicated);
        self.check_replicated(index, &results, &replicated)?;
        let results = results.into_iter().enumerate();
        Ok(results.filter(|(slot, _)| replicated.position(*slot).rank == 0).collect())
    }

    /// Checks that the members of each group have the same result.
    fn check_replicated(&self, index: usize, results: &[Tensor], groups: &Groups) -> Result<()> {
        for slot in 0..results.len() {
            let first = groups.group_members(slot)[0];
            if first == slot {
                continue;
            }
            let are_equal = match &self.comparison {
                Comparison::Trusted => true,
                Comparison::Bits => {
                    bits_equal(&results[first], &results[slot]).map_err(Error::gather(index))?
                }
                Comparison::Fingerprints(prints) => prints[first][index] == prints[slot][index],
            };
            if !are_equal {
                return Err(ValueError::NotReplicated { index, slot, first }.into());
            }
        }
        Ok(())
    }

    /// Returns one slot's part of a joined result, on the home device.
    fn part(
        &self,
        index: usize,
        slot: usize,
        tensor: &Tensor,
        set: AxisSet,
        treatment: Treatment,
    ) -> Result<Tensor> {
        let tensor = to_device(tensor, self.home).map_err(Error::gather(index))?;
        match (treatment, self.cut) {
            (Treatment::Shard(dim), Some(cut)) => {
                let dim = spec::find_dim(Side::Out, index, dim, &tensor)?;
                cut.trim(&tensor, dim, set, slot).map_err(Error::gather(index))
            }
            _ => Ok(tensor),
        }
    }
}

/// Returns the axes that `spec` does not name, along which a result is replicated.
pub(crate) fn replicated_axes(spec: &ResolvedSpec, topology: &Topology) -> Result<AxisSet> {
    let named = spec.iter().fold(0, |named, (set, _)| named | set);
    Ok(topology.set(&ALL)? & !named)
}

/// Writes `parts` into `kept` along `dim`. They must fill it.
fn write_into(kept: &Tensor, index: usize, dim: usize, parts: &[Tensor]) -> Result<()> {
    if let ([], [part]) = (kept.dims(), parts)
        && part.rank() == 0
    {
        // candle writes along a dimension, and a scalar has no dimension.
        let kept = kept.reshape(1).map_err(Error::gather(index))?;
        let part = part.reshape(1).map_err(Error::gather(index))?;
        return write_into(&kept, index, 0, &[part]);
    }
    let mut size = 0;
    for part in parts {
        let part = to_contiguous(part).map_err(Error::gather(index))?;
        kept.slice_set(&part, dim, size).map_err(Error::gather(index))?;
        size += part.dims()[dim];
    }
    // candle only checks that each part fits.
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
        Treatment::Sum => reduce_parts(parts, Reduction::Sum),
        Treatment::Mean if !first.dtype().is_float() => {
            return Err(SpecFault::MeanOfIntegers { index, dtype: first.dtype() }.into());
        }
        Treatment::Mean => reduce_parts(parts, Reduction::Mean),
    };
    combined.map_err(Error::gather(index))
}

/// Reduces in the order of the mesh with the kernel of the collectives, so that `P::sum` has the
/// same bits as `psum`.
fn reduce_parts(parts: &[Tensor], reduction: Reduction) -> candle_core::Result<Tensor> {
    let first = &parts[0];
    if let Some(other) = parts.iter().find(|part| part.shape() != first.shape()) {
        bail!("cannot add shapes {:?} and {:?}", first.dims(), other.dims());
    }
    let on_host = parts.iter().map(to_host).collect::<candle_core::Result<Vec<_>>>()?;
    to_device(&reduce::tensors(&on_host, reduction)?, first.device())
}

/// Returns true if two tensors are equal to the bit, on any devices.
pub(crate) fn bits_equal(left: &Tensor, right: &Tensor) -> candle_core::Result<bool> {
    if left.shape() != right.shape() || left.dtype() != right.dtype() {
        return Ok(false);
    }
    if is_one_storage(left, right) {
        return Ok(true);
    }
    if reduce::has_kernel(left.dtype()) {
        reduce::equal_to_the_bit(&to_host(left)?, &to_host(right)?)
    } else {
        Ok(bytes(left)? == bytes(right)?)
    }
}

/// Returns a hash that differs for tensors that are not the [`bits_equal`], except for one pair in 2^64.
pub(crate) fn fingerprint(x: &Tensor) -> candle_core::Result<u64> {
    let mut fingerprint = Fingerprint::new();
    fingerprint.write_bytes(x.dtype().as_str().as_bytes()).write_u64(x.rank() as u64);
    fingerprint.extend(x.dims().iter().map(|&size| size as u64));
    if reduce::has_kernel(x.dtype()) {
        reduce::fingerprint(&to_host(x)?, &mut fingerprint)?;
    } else {
        fingerprint.write_bytes(&bytes(x)?);
    }
    Ok(fingerprint.finish())
}

/// Returns true if both tensors are the same view of one storage, like the results of a large
/// `psum`.
fn is_one_storage(left: &Tensor, right: &Tensor) -> bool {
    // Lock one storage at a time: while this thread held one lock and waited for the other, a
    // `Var::set` could wait for the first and deadlock.
    let address = |x: &Tensor| std::ptr::from_ref(&*x.storage_and_layout().0).addr();
    left.stride() == right.stride()
        && left.layout().start_offset() == right.layout().start_offset()
        && address(left) == address(right)
}

fn bytes(tensor: &Tensor) -> candle_core::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    contiguous_copy(tensor)?.write_bytes(&mut bytes)?;
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
    fn equality_and_fingerprint_see_every_item() {
        let zeros = |len: usize, dtype| Tensor::zeros(len, dtype, &Device::Cpu).unwrap();
        let dtypes = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::F8E4M3];
        let integers = [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64];
        for (dtype, len) in dtypes
            .into_iter()
            .chain(integers)
            .flat_map(|dtype| [1, 4097, 9000].map(|len| (dtype, len)))
        {
            let x = zeros(len, dtype);
            assert!(bits_equal(&x, &x).unwrap() && bits_equal(&x, &zeros(len, dtype)).unwrap());
            assert_eq!(print(&x), print(&zeros(len, dtype)));
            let one = Tensor::ones(1, DType::F32, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            // The first item of a fingerprint's word, and the last item of all.
            for position in [0, len - 1] {
                let head = zeros(position, dtype);
                let tail = zeros(len - 1 - position, dtype);
                let other = Tensor::cat(&[&head, &one, &tail], 0).unwrap();
                assert!(
                    !bits_equal(&x, &other).unwrap() && !bits_equal(&other, &x).unwrap(),
                    "{dtype:?}"
                );
                assert_ne!(print(&x), print(&other), "{dtype:?} {len} {position}");
            }
        }
        let column = zeros(2, DType::F32);
        for other in [zeros(2, DType::U32), column.reshape((1, 2)).unwrap()] {
            assert!(!bits_equal(&column, &other).unwrap());
            assert_ne!(print(&column), print(&other));
        }
    }

    #[test]
    fn equality_compares_bits() {
        let scalar = |x: f32| Tensor::new(x, &Device::Cpu).unwrap();
        assert!(bits_equal(&scalar(f32::NAN), &scalar(f32::NAN)).unwrap());
        assert!(!bits_equal(&scalar(0.0), &scalar(-0.0)).unwrap());
        assert_ne!(print(&scalar(0.0)), print(&scalar(-0.0)));
    }

    #[test]
    fn views_are_compared_by_items() {
        let x = Tensor::new(&[1_f32, 2., 1., 3.], &Device::Cpu).unwrap();
        let item = |start| x.narrow(0, start, 1).unwrap();
        assert!(bits_equal(&item(0), &item(0)).unwrap() && bits_equal(&item(0), &item(2)).unwrap());
        assert!(!bits_equal(&item(0), &item(1)).unwrap());
        assert_eq!([print(&item(0)), print(&item(1))], [print(&item(2)), print(&item(1))]);
        assert_ne!(print(&item(0)), print(&item(1)));
        let square = x.reshape((2, 2)).unwrap();
        assert!(!bits_equal(&square, &square.t().unwrap()).unwrap());
    }
}
