//! Cutting inputs into shards and putting outputs together.

use candle_core::{Device, Tensor};

use crate::{
    axes::{InAxis, OutAxis, normalize},
    error::{Error, Result},
};

/// How one input is cut: checked once, before any replica starts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cut {
    Whole,
    /// `size` rows along dimension `dim` for each device.
    Along {
        dim: usize,
        size: usize,
    },
}

impl Cut {
    /// The cut of input `index` over `devices` devices.
    pub(crate) fn new(index: usize, input: &Tensor, axis: InAxis, devices: usize) -> Result<Self> {
        let InAxis::Shard(axis) = axis else { return Ok(Self::Whole) };
        let dim = find_axis("in", index, axis, input.dims())?;
        let size = input.dims()[dim];
        if !size.is_multiple_of(devices) {
            return Err(Error::NotDivisible { index, axis, size, devices });
        }
        Ok(Self::Along { dim, size: size / devices })
    }

    /// The shard of replica `replica`: a view, without a copy.
    pub(crate) fn view(self, input: &Tensor, replica: usize) -> candle_core::Result<Tensor> {
        match self {
            Self::Whole => Ok(input.clone()),
            Self::Along { dim, size } => input.narrow(dim, replica * size, size),
        }
    }
}

/// Moves a shard to the device of its replica.
///
/// A shard along an inner axis is copied, because some of candle's operations refuse tensors with gaps; one that
/// leaves its device is copied first, because candle would move all of the storage that the view looks at.
pub(crate) fn place(shard: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    if shard.device().same_device(device) { shard.contiguous() } else { shard.force_contiguous()?.to_device(device) }
}

/// Makes one tensor on `home` of output `index` of all replicas.
pub(crate) fn gather(index: usize, outputs: &[Tensor], axis: OutAxis, home: &Device) -> Result<Tensor> {
    let failed = |source| Error::Gather { index, source };
    let outputs: Vec<Tensor> =
        outputs.iter().map(|output| output.to_device(home)).collect::<Result<_, _>>().map_err(failed)?;
    match axis {
        OutAxis::Gather(axis) => {
            let dim = find_axis("out", index, axis, outputs[0].dims())?;
            Tensor::cat(&outputs, dim).map_err(failed)
        }
        OutAxis::Sum => sum(&outputs).map_err(failed),
        OutAxis::Mean if !outputs[0].dtype().is_float() => {
            Err(Error::MeanOfIntegers { index, dtype: outputs[0].dtype() })
        }
        OutAxis::Mean => sum(&outputs).and_then(|sum| sum / outputs.len() as f64).map_err(failed),
    }
}

/// Adds up in the order of the mesh, so that rounding does not depend on which replica finished first.
fn sum(outputs: &[Tensor]) -> candle_core::Result<Tensor> {
    outputs[1..].iter().try_fold(outputs[0].clone(), |sum, output| sum + output)
}

fn find_axis(side: &'static str, index: usize, axis: isize, shape: &[usize]) -> Result<usize> {
    normalize(axis, shape.len()).ok_or_else(|| Error::AxisOutOfRange { side, index, axis, shape: shape.to_vec() })
}
