//! How processes find out that they do not call the same collective, and say so.

use candle_core::Tensor;

use crate::{engine::call::CollectiveCall, error::Error, mesh::topology::Topology};

/// The longest description of a call.
pub(crate) const TEXT_BYTES: usize = 4096;

/// A number that differs if calls, or the types or shapes of what is brought, do not agree. FNV-1a.
pub(crate) fn agreement(call: &CollectiveCall, tensors: &[Tensor]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut eat = |bytes: &[u8]| {
        for byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    };
    eat(call.op.as_bytes());
    eat(call.detail.as_bytes());
    eat(&call.set.to_le_bytes());
    eat(format!("{:?}", call.free_dim).as_bytes());
    let sizes = |dims: &[usize]| -> Vec<u8> {
        let sizes = dims.iter().enumerate().filter(|(dim, _)| Some(*dim) != call.free_dim);
        sizes.flat_map(|(_, size)| (*size as u64).to_le_bytes()).collect()
    };
    eat(call.dtype.map_or("", |dtype| dtype.as_str()).as_bytes());
    eat(&sizes(&call.shape));
    for tensor in tensors {
        eat(tensor.dtype().as_str().as_bytes());
        eat(&sizes(tensor.dims()));
    }
    hash
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

/// What all members of `slot`'s group return if the first one and `other` do not agree, from what
/// they call.
pub(crate) fn disagreement(
    topology: &Topology,
    slot: usize,
    call: &CollectiveCall,
    other: usize,
    description_of: impl Fn(usize) -> Vec<u8>,
) -> candle_core::Error {
    let text =
        |member| String::from_utf8_lossy(&description_of(member)).trim_end_matches('\0').to_owned();
    let groups = topology.groups(call.set);
    let members = groups.members_with(slot);
    candle_core::Error::wrap(Error::MismatchAcross {
        left: members[0],
        left_call: text(0),
        right: members[other],
        right_call: text(other),
    })
}
