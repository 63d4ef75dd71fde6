//! How processes find out that they do not call the same collective, and say so.

use candle_core::Tensor;
use core_types::Fingerprint;

use crate::{
    engine::Site,
    error::{CollectiveError, call::CollectiveCall},
};

/// The longest description of a call: a path, a shape and a list of pairs of ranks fit in.
pub(crate) const TEXT_BYTES: usize = 4096;

/// A number that differs if calls, or the types or shapes of what is passed, do not agree.
pub(crate) fn agreement(call: &CollectiveCall, tensors: &[Tensor]) -> u64 {
    let mut agreement = Fingerprint::new();
    agreement
        .write_bytes(call.op.as_bytes())
        .write_bytes(call.detail.as_bytes())
        .write_u64(call.set);
    // Nothing is allocated here: a sum of a few bytes takes 2 µs.
    agreement.write_u64(match call.free_dim {
        Some(dim) => dim as u64,
        None => u64::MAX,
    });
    agreement.write_bytes(match call.dtype {
        Some(dtype) => dtype.as_str().as_bytes(),
        None => b"none",
    });
    add_sizes(&mut agreement, call, &call.shape);
    for tensor in tensors {
        agreement.write_bytes(tensor.dtype().as_str().as_bytes());
        add_sizes(&mut agreement, call, tensor.dims());
    }
    agreement.finish()
}

/// The sizes that must agree, and how many dimensions there are.
fn add_sizes(agreement: &mut Fingerprint, call: &CollectiveCall, dims: &[usize]) {
    agreement.write_u64(dims.len() as u64);
    for (dim, &size) in dims.iter().enumerate() {
        if Some(dim) != call.free_dim {
            agreement.write_u64(size as u64);
        }
    }
}

/// What this process calls, in [`TEXT_BYTES`]; the tensors are named where the call does not.
pub(crate) fn description(call: &CollectiveCall, tensors: &[Tensor]) -> Vec<u8> {
    let mut text = call.to_string();
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

/// What all members of a group return if the first one and that of rank `other` do not agree, given
/// the [`description`] of each rank.
pub(crate) fn disagreement(
    site: &Site,
    other: usize,
    description_of: impl Fn(usize) -> Vec<u8>,
) -> candle_core::Error {
    let text =
        |rank| String::from_utf8_lossy(&description_of(rank)).trim_end_matches('\0').to_owned();
    candle_core::Error::wrap(CollectiveError::Mismatch {
        left: site.members()[0],
        left_call: text(0),
        right: site.members()[other],
        right_call: text(other),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use candle_core::{DType, Device};

    use super::*;
    use crate::{axes::ALL, grid::Topology};

    fn site(x: Option<&Tensor>) -> Site {
        let topology = Topology::new(vec![("a".into(), 2), ("b".into(), 2)], 4).unwrap();
        Site::along(ALL, &topology, 0, "psum", x).unwrap()
    }

    fn zeros(shape: &[usize], dtype: DType) -> Tensor {
        Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
    }

    #[test]
    fn all_that_must_agree_changes_the_number() {
        let x = zeros(&[2, 3], DType::F32);
        let along_b = {
            let topology = Topology::new(vec![("a".into(), 2), ("b".into(), 2)], 4).unwrap();
            Site::along("b".into(), &topology, 0, "psum", Some(&x)).unwrap()
        };
        let sites = [
            site(None),
            site(Some(&x)),
            site(Some(&zeros(&[3, 2], DType::F32))),
            site(Some(&zeros(&[6], DType::F32))),
            site(Some(&zeros(&[2, 3], DType::F64))),
            site(Some(&x)).with_detail("(1)".into()),
            site(Some(&x)).with_free_dim(0),
            site(Some(&x)).with_free_dim(1),
            along_b,
        ];
        let numbers: BTreeSet<u64> = sites.iter().map(|site| agreement(&site.call, &[])).collect();
        assert_eq!(numbers.len(), sites.len());
        assert_ne!(agreement(&site(None).call, &[x]), agreement(&site(None).call, &[]));
    }

    #[test]
    fn sizes_in_a_free_dimension_need_not_agree() {
        let number = |rows| {
            let x = zeros(&[rows, 3], DType::F32);
            agreement(&site(Some(&x)).with_free_dim(0).call, &[x])
        };
        assert_eq!(number(2), number(5));
    }

    #[test]
    fn a_disagreement_names_both_calls_without_their_padding() {
        let x = zeros(&[2], DType::F32);
        let texts = [site(Some(&x)), site(None)].map(|site| description(&site.call, &[]));
        let error = disagreement(&site(None), 1, |rank| texts[rank].clone()).to_string();
        assert!(error.starts_with("replica 0 calls psum of f32 [2] over all axes at "), "{error}");
        assert!(error.contains(", replica 1 calls psum over all axes at "), "{error}");
        assert!(!error.contains('\0'));
    }
}
