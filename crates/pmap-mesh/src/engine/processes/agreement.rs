//! Detection of processes that call different collectives, and the error for it.

use candle_core::Tensor;
use core_types::Fingerprint;

use crate::{
    engine::GroupContext,
    error::{CollectiveError, call::CollectiveCall},
};

/// The size of a call's description in bytes: enough for a path, a shape and a list of pairs of
/// ranks.
pub(crate) const TEXT_BYTES: usize = 4096;

/// Returns a hash of a call and of the dtypes and shapes of its tensors. Calls that do not agree
/// have different hashes.
pub(crate) fn call_hash(call: &CollectiveCall, tensors: &[Tensor]) -> u64 {
    let mut hash = Fingerprint::new();
    hash.write_bytes(call.op.as_bytes())
        .write_bytes(call.detail.as_bytes())
        .write_u64(call.axis_set);
    // Do not allocate here: a whole `all_reduce` of a few bytes takes only 2 µs.
    hash.write_u64(match call.free_dim {
        Some(dim) => dim as u64,
        None => u64::MAX,
    });
    hash.write_bytes(match call.dtype {
        Some(dtype) => dtype.as_str().as_bytes(),
        None => b"none",
    });
    add_sizes(&mut hash, call, &call.shape);
    for tensor in tensors {
        hash.write_bytes(tensor.dtype().as_str().as_bytes());
        add_sizes(&mut hash, call, tensor.dims());
    }
    hash.finish()
}

/// Adds the number of dimensions, and the sizes in all dimensions but the free one, to a
/// fingerprint.
fn add_sizes(hash: &mut Fingerprint, call: &CollectiveCall, dims: &[usize]) {
    hash.write_u64(dims.len() as u64);
    for (dim, &size) in dims.iter().enumerate() {
        if Some(dim) != call.free_dim {
            hash.write_u64(size as u64);
        }
    }
}

/// Returns the description of this process's call, padded or cut to [`TEXT_BYTES`]. It includes the
/// dtypes and shapes of the tensors if the call has no single tensor.
pub(crate) fn description(call: &CollectiveCall, tensors: &[Tensor]) -> Vec<u8> {
    let mut text = call.to_string();
    // The text of a call with a single tensor already shows its dtype and shape.
    if call.dtype.is_none() && !tensors.is_empty() {
        let shapes: Vec<_> =
            tensors.iter().map(|x| format!("{} {:?}", x.dtype().as_str(), x.dims())).collect();
        text.push_str(" of ");
        text.push_str(&shapes.join(", "));
    }
    let mut bytes = text.into_bytes();
    bytes.resize(TEXT_BYTES, 0);
    bytes
}

/// Returns the error for a group in which rank 0 and rank `other` do not agree, given the
/// [`description`] of each rank.
pub(crate) fn disagreement(
    ctx: &GroupContext,
    other: usize,
    description_of: impl Fn(usize) -> Vec<u8>,
) -> candle_core::Error {
    let text =
        |rank| String::from_utf8_lossy(&description_of(rank)).trim_end_matches('\0').to_owned();
    candle_core::Error::wrap(CollectiveError::Mismatch {
        left: ctx.members()[0],
        left_call: text(0),
        right: ctx.members()[other],
        right_call: text(other),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use candle_core::{DType, Device};

    use super::*;
    use crate::{axes::ALL, grid::Topology};

    fn ctx(x: Option<&Tensor>) -> GroupContext {
        let topology = Topology::new(vec![("a".into(), 2), ("b".into(), 2)], 4).unwrap();
        GroupContext::new(ALL, &topology, 0, "psum", x).unwrap()
    }

    fn zeros(shape: &[usize], dtype: DType) -> Tensor {
        Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
    }

    #[test]
    fn every_checked_part_changes_the_hash() {
        let x = zeros(&[2, 3], DType::F32);
        let along_b = {
            let topology = Topology::new(vec![("a".into(), 2), ("b".into(), 2)], 4).unwrap();
            GroupContext::new("b".into(), &topology, 0, "psum", Some(&x)).unwrap()
        };
        let contexts = [
            ctx(None),
            ctx(Some(&x)),
            ctx(Some(&zeros(&[3, 2], DType::F32))),
            ctx(Some(&zeros(&[6], DType::F32))),
            ctx(Some(&zeros(&[2, 3], DType::F64))),
            ctx(Some(&x)).with_detail("(1)".into()),
            ctx(Some(&x)).with_free_dim(0),
            ctx(Some(&x)).with_free_dim(1),
            along_b,
        ];
        let numbers: BTreeSet<u64> = contexts.iter().map(|ctx| call_hash(&ctx.call, &[])).collect();
        assert_eq!(numbers.len(), contexts.len());
        assert_ne!(call_hash(&ctx(None).call, &[x]), call_hash(&ctx(None).call, &[]));
    }

    #[test]
    fn free_dimension_is_not_hashed() {
        let number = |rows| {
            let x = zeros(&[rows, 3], DType::F32);
            call_hash(&ctx(Some(&x)).with_free_dim(0).call, &[x])
        };
        assert_eq!(number(2), number(5));
    }

    #[test]
    fn disagreement_names_both_calls() {
        let x = zeros(&[2], DType::F32);
        let texts = [ctx(Some(&x)), ctx(None)].map(|ctx| description(&ctx.call, &[]));
        let error = disagreement(&ctx(None), 1, |rank| texts[rank].clone()).to_string();
        assert!(error.starts_with("replica 0 calls psum of f32 [2] over all axes at "), "{error}");
        assert!(error.contains(", replica 1 calls psum over all axes at "), "{error}");
        assert!(!error.contains('\0'));
    }
}
