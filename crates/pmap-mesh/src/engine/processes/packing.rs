//! The encoding of a list of tensors, or of an error, as one tensor of bytes. The tensors of a list
//! may have any dtypes and shapes.

use candle_core::{Device, Result, Tensor, safetensors::Load};
use safetensors::SafeTensors;

use crate::device::to_device::{contiguous_copy, to_host};

/// The name of the tensor that contains the error, in a message that has an error instead of a
/// list.
const REASON: &str = "reason";

/// Encodes a list as a safetensors file, in which the name of a tensor is its index in the list.
pub(super) fn encode_list(list: &[Tensor], device: &Device) -> Result<Tensor> {
    let host = list
        .iter()
        .map(|tensor| contiguous_copy(tensor)?.to_device(&Device::Cpu))
        .collect::<Result<Vec<_>>>()?;
    let named = host.iter().enumerate().map(|(n, tensor)| (n.to_string(), tensor));
    byte_tensor(safetensors::serialize(named, None)?, device)
}

/// Encodes an error in place of a list.
pub(super) fn encode_reason(reason: &str, device: &Device) -> Result<Tensor> {
    let text = Tensor::new(reason.as_bytes(), &Device::Cpu)?;
    byte_tensor(safetensors::serialize([(REASON, &text)], None)?, device)
}

fn byte_tensor(bytes: Vec<u8>, device: &Device) -> Result<Tensor> {
    let len = bytes.len();
    Tensor::from_vec(bytes, len, device)
}

/// Decodes a message: the list of a process, or the error of a process that failed to send its
/// list.
pub(super) fn decode(bytes: &Tensor) -> Result<std::result::Result<Vec<Tensor>, String>> {
    let bytes: Vec<u8> = to_host(bytes)?.to_vec1()?;
    let file = SafeTensors::deserialize(&bytes)?;
    if let Ok(reason) = file.tensor(REASON) {
        return Ok(Err(String::from_utf8_lossy(reason.data()).into_owned()));
    }
    (0..file.len())
        .map(|n: usize| file.tensor(&n.to_string())?.load(&Device::Cpu))
        .collect::<Result<_>>()
        .map(Ok)
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    #[test]
    fn lists_are_decoded_unchanged() {
        let x = Tensor::arange(0_f32, 6., &Device::Cpu).unwrap().reshape((2, 3)).unwrap();
        let list = [x.t().unwrap(), Tensor::zeros((0, 4), DType::BF16, &Device::Cpu).unwrap()];
        let arrived = decode(&encode_list(&list, &Device::Cpu).unwrap()).unwrap().unwrap();
        assert_eq!(arrived[0].to_vec2::<f32>().unwrap(), [[0., 3.], [1., 4.], [2., 5.]]);
        assert_eq!((arrived[1].dims(), arrived[1].dtype()), (&[0, 4][..], DType::BF16));
        assert!(decode(&encode_list(&[], &Device::Cpu).unwrap()).unwrap().unwrap().is_empty());
    }

    #[test]
    fn reason_replaces_a_list() {
        for reason in ["", "output 3 cannot be gathered: ä/→"] {
            let message = encode_reason(reason, &Device::Cpu).unwrap();
            assert_eq!(decode(&message).unwrap().unwrap_err(), reason);
        }
    }
}
