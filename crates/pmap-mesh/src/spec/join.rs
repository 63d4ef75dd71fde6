//! The join of the replicas' results into one tensor for each output.

use candle_core::{Device, Tensor};
use core_types::Fingerprint;

use crate::{
    axes::{ALL, AxisSet},
    device::to_device::{contiguous_copy, to_contiguous, to_device, to_host},
    error::{
        Error, Result, ValueError,
        fault::{Side, SpecFault},
    },
    grid::{Groups, Topology},
    reduce,
    spec::{self, ResolvedSpec, Treatment, cut::ArgumentCuts},
};

/// The join of one call's results.
pub(crate) struct ResultJoin<'a> {
    pub(crate) topology: &'a Topology,
    /// The device of joined results.
    pub(crate) home: &'a Device,
    /// The cuts of the first argument that was cut, if any: results with `Shard` lose their
    /// padding.
    pub(crate) first_cut: Option<&'a ArgumentCuts>,
    pub(crate) comparison: Comparison,
}

/// The method that compares replicated results, of which only the first slot's result is returned.
pub(crate) enum Comparison {
    /// Does not compare them.
    Trusted,
    /// Compares all bits.
    Bits,
    /// Compares their [`fingerprint`]s, by slot and result, because this process does not have the
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
        let mut parts = self.take_first_replicas(index, results, spec)?;
        // Undo the cuts in reverse order.
        for &(set, treatment) in spec.iter().rev() {
            parts = self.join_along(index, &parts, set, treatment)?;
        }
        // All parts have been joined into one.
        let (_, result) = parts.swap_remove(0);
        to_device(&result, self.home).map_err(Error::gather(index))
    }

    /// Joins the results of each group along `set`, given pairs of a slot and its tensor. Returns
    /// pairs of a group's first slot and the group's tensor.
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

    /// Joins result number `index` of all slots into `out`, a contiguous tensor of the joined
    /// shape.
    pub(crate) fn join_into(
        &self,
        index: usize,
        results: Vec<Tensor>,
        spec: &ResolvedSpec,
        out: &Tensor,
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
                write_into(out, index, dim, &parts?)
            }
            _ => write_into(out, index, 0, &[self.join(index, results, spec)?]),
        }
    }

    /// Returns one slot, with its result, for each part of the output.
    ///
    /// Slots that differ only along axes that `spec` does not name hold the same part: the first of
    /// them is returned. It is an error if their results differ.
    fn take_first_replicas(
        &self,
        index: usize,
        results: Vec<Tensor>,
        spec: &ResolvedSpec,
    ) -> Result<Vec<(usize, Tensor)>> {
        let set = replicated_axes(spec, self.topology)?;
        if set == 0 {
            return Ok(results.into_iter().enumerate().collect());
        }
        let groups = self.topology.groups(set);
        self.check_replicated(index, &results, &groups)?;
        let by_slot = results.into_iter().enumerate();
        Ok(by_slot.filter(|(slot, _)| groups.position(*slot).rank == 0).collect())
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
                Comparison::Fingerprints(fingerprints) => {
                    fingerprints[first][index] == fingerprints[slot][index]
                }
            };
            if !are_equal {
                return Err(ValueError::NotReplicated { index, slot, first }.into());
            }
        }
        Ok(())
    }

    /// Returns one slot's part of a joined result on the home device, without the padding of the
    /// cut.
    fn part(
        &self,
        index: usize,
        slot: usize,
        tensor: &Tensor,
        set: AxisSet,
        treatment: Treatment,
    ) -> Result<Tensor> {
        let tensor = to_device(tensor, self.home).map_err(Error::gather(index))?;
        match (treatment, self.first_cut) {
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

/// Writes `parts` one after another into `out` along `dim`. Together they must fill `out`.
fn write_into(out: &Tensor, index: usize, dim: usize, parts: &[Tensor]) -> Result<()> {
    if let ([], [part]) = (out.dims(), parts)
        && part.rank() == 0
    {
        // candle writes along a dimension, and a scalar has no dimension.
        let flat_out = out.reshape(1).map_err(Error::gather(index))?;
        let flat_part = part.reshape(1).map_err(Error::gather(index))?;
        return write_into(&flat_out, index, 0, &[flat_part]);
    }
    let mut size = 0;
    for part in parts {
        let part = to_contiguous(part).map_err(Error::gather(index))?;
        out.slice_set(&part, dim, size).map_err(Error::gather(index))?;
        size += part.dims()[dim];
    }
    // candle checks that each part fits, but not that the parts fill the tensor.
    if size == out.dims()[dim] {
        return Ok(());
    }
    let shape = out.dims();
    Err(SpecFault(format!(
        "output {index} has size {size} in dimension {dim}, but the tensor passed for it has shape {shape:?}"
    ))
    .into())
}

/// Joins the parts of one group.
fn combine(index: usize, parts: &[Tensor], treatment: Treatment) -> Result<Tensor> {
    let first = &parts[0];
    let combined = match treatment {
        Treatment::Shard(dim) | Treatment::Concat(dim) => {
            Tensor::cat(parts, spec::find_dim(Side::Out, index, dim, first)?)
        }
        Treatment::Stack(dim) => {
            let out_of_range = || SpecFault::out_of_range(Side::Out, index, dim, first.dims());
            Tensor::stack(parts, spec::normalize(dim, first.rank() + 1).ok_or_else(out_of_range)?)
        }
    };
    combined.map_err(Error::gather(index))
}

/// Returns true if two tensors, on any devices, have the same dtype, shape and bits.
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

/// Returns a hash of a tensor. It is equal for tensors that are [`bits_equal`]; of other pairs of
/// tensors, only one in 2^64 has equal hashes.
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
    // Lock one storage at a time: if this thread waited for the second lock while it held the
    // first, it could deadlock with a `Var::set` that waits for the first lock.
    let address = |x: &Tensor| std::ptr::from_ref(&*x.storage_and_layout().0).addr();
    left.stride() == right.stride()
        && left.layout().start_offset() == right.layout().start_offset()
        && address(left) == address(right)
}

/// Returns the items of a tensor as bytes.
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
