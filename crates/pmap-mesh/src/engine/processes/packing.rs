//! What a process tells the others as one tensor of bytes, and back: tensors of any types and
//! shapes, or why it has none.

use candle_core::{Device, Result, Tensor, safetensors::Load};
use safetensors::SafeTensors;

use crate::device::to_device::{copied, on_host};

/// The name of a tensor that says why there is no list.
const REASON: &str = "reason";

/// A list as a safetensors file, whose names are the numbers of the tensors.
pub(super) fn packed(list: &[Tensor], device: &Device) -> Result<Tensor> {
    let host = list
        .iter()
        .map(|tensor| copied(tensor)?.to_device(&Device::Cpu))
        .collect::<Result<Vec<_>>>()?;
    let named = host.iter().enumerate().map(|(n, tensor)| (n.to_string(), tensor));
    file(safetensors::serialize(named, None)?, device)
}

/// In the place of a list, why there is none.
pub(super) fn packed_reason(reason: &str, device: &Device) -> Result<Tensor> {
    let text = Tensor::new(reason.as_bytes(), &Device::Cpu)?;
    file(safetensors::serialize([(REASON, &text)], None)?, device)
}

fn file(bytes: Vec<u8>, device: &Device) -> Result<Tensor> {
    let len = bytes.len();
    Tensor::from_vec(bytes, len, device)
}

/// A list, or why the process that was to send it has none.
pub(super) fn unpacked(bytes: &Tensor) -> Result<std::result::Result<Vec<Tensor>, String>> {
    let bytes: Vec<u8> = on_host(bytes)?.to_vec1()?;
    let file = SafeTensors::deserialize(&bytes)?;
    if let Ok(reason) = file.tensor(REASON) {
        return Ok(Err(String::from_utf8_lossy(reason.data()).into_owned()));
    }
    let nth = |n: usize| file.tensor(&n.to_string())?.load(&Device::Cpu);
    (0..file.len()).map(nth).collect::<Result<_>>().map(Ok)
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    #[test]
    fn lists_arrive_as_they_are() {
        let x = Tensor::arange(0_f32, 6., &Device::Cpu).unwrap().reshape((2, 3)).unwrap();
        let list = [x.t().unwrap(), Tensor::zeros((0, 4), DType::BF16, &Device::Cpu).unwrap()];
        let arrived = unpacked(&packed(&list, &Device::Cpu).unwrap()).unwrap().unwrap();
        assert_eq!(arrived[0].to_vec2::<f32>().unwrap(), [[0., 3.], [1., 4.], [2., 5.]]);
        assert_eq!((arrived[1].dims(), arrived[1].dtype()), (&[0, 4][..], DType::BF16));
        assert!(unpacked(&packed(&[], &Device::Cpu).unwrap()).unwrap().unwrap().is_empty());
    }

    #[test]
    fn a_reason_arrives_in_the_place_of_a_list() {
        for reason in ["", "output 3 cannot be gathered: ä/→"] {
            let message = packed_reason(reason, &Device::Cpu).unwrap();
            assert_eq!(unpacked(&message).unwrap().unwrap_err(), reason);
        }
    }
}
