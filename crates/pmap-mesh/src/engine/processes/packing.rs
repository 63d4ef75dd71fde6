//! Tensors of any types and shapes as one tensor of bytes, and back.

use candle_core::{Device, Result, Tensor, safetensors::Load};
use safetensors::SafeTensors;

use crate::mesh::place::{copied, on_host};

/// A safetensors file, whose names are the numbers of the tensors.
pub(super) fn packed(list: &[Tensor]) -> Result<Tensor> {
    let host = list
        .iter()
        .map(|tensor| copied(tensor)?.to_device(&Device::Cpu))
        .collect::<Result<Vec<_>>>()?;
    let named = host.iter().enumerate().map(|(n, tensor)| (n.to_string(), tensor));
    let bytes = safetensors::serialize(named, None)?;
    let len = bytes.len();
    Tensor::from_vec(bytes, len, &Device::Cpu)
}

pub(super) fn unpacked(bytes: &Tensor) -> Result<Vec<Tensor>> {
    let bytes: Vec<u8> = on_host(bytes)?.to_vec1()?;
    let file = SafeTensors::deserialize(&bytes)?;
    (0..file.len()).map(|n| file.tensor(&n.to_string())?.load(&Device::Cpu)).collect()
}
