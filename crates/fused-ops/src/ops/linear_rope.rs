//! A projection to queries or keys in one step: a linear layer with a rotated result.

use candle_core::{DType, Tensor};

use crate::{
    affine::{AffineLayer, n_rows},
    autograd::{Backward, CpuSlice, record},
    composed,
    error::{Error, Result},
    kernels::{
        float::Float,
        rope::{PairLayout, RotationDirection},
    },
    ops::rope::{RopeAngles, check_angles},
    route::{Route, last_dim},
};

const OP: &str = "linear_rope";
const NAMES: [&str; 2] = ["weight", "bias"];

/// Projects `x` by [`linear`](crate::linear()) and rotates the heads by [`rope_thd`](crate::rope_thd),
/// as Llama and its relatives compute queries and keys.
///
/// The projection stays out of candle's graph, since no gradient needs it.
///
/// # Shapes
///
/// `x` [batch, length, inputs], `weight` [heads · size, inputs], `bias` [heads · size], `cos` and
/// `sin` [at least length, size / 2]; the result is [batch, length, heads, size].
///
/// # Determinism
///
/// Like [`linear`](crate::linear()). In `f32` and `f64` the result has the same bits as the two
/// operations. In `f16` and `bf16` the fused kernels round once, and the two operations twice.
///
/// # Errors
///
/// The errors of [`linear`](crate::linear()) and [`rope_thd`](crate::rope_thd); [`Shape`](Error::Shape) also
/// if the number of outputs is not a multiple of the size of a head.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fused_ops::linear_rope;
///
/// // One position, whose only head of size 2 is turned by a quarter: (a, b) becomes (−b, a).
/// let x = Tensor::new(&[[[1.0_f32, 2.0]]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[3.0_f32, 0.0], [0.0, 1.0]], &Device::Cpu)?;
/// let (cos, sin) = (Tensor::new(&[[0.0_f32]], &Device::Cpu)?, Tensor::new(&[[1.0_f32]], &Device::Cpu)?);
/// let y = linear_rope(&x, &weight, None, &cos, &sin)?;
/// assert_eq!(y.dims(), [1, 1, 1, 2]);
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [-2.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn linear_rope(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<Tensor> {
    apply(x, &AffineLayer::new(weight, bias), cos, sin)
}

/// Projects by a layer with or without an adapter, and rotates.
pub(crate) fn apply(x: &Tensor, layer: &AffineLayer, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (length, heads) = check(x, layer, cos)?;
    let half = cos.dims()[1];
    check_angles(OP, ("cos", cos), length, half)?;
    check_angles(OP, ("sin", sin), length, half)?;
    let cos = &cos.narrow(0, 0, length)?;
    let sin = &sin.narrow(0, 0, length)?;
    let inputs = [("x", x), ("cos", cos), ("sin", sin)].into_iter().chain(layer.named(NAMES));
    match Route::new(OP, &inputs.collect::<Vec<_>>())? {
        Route::F32 => fused::<f32>(x, layer, cos, sin),
        Route::F64 => fused::<f64>(x, layer, cos, sin),
        Route::Half(half) => {
            let [x, cos, sin] = [x, cos, sin].map(|tensor| tensor.to_dtype(DType::F32));
            Ok(fused::<f32>(&x?, &layer.to_f32()?, &cos?, &sin?)?.to_dtype(half)?)
        }
        Route::Composed => Ok(composed::split_and_rotate(&layer.composed(x)?, heads, cos, sin)?),
    }
}

/// Checks the shapes, and returns the number of positions and the number of heads.
fn check(x: &Tensor, layer: &AffineLayer, cos: &Tensor) -> Result<(usize, usize)> {
    let shape = |input, tensor: &Tensor, expected: String| {
        Err(Error::Shape { op: OP, input, found: tensor.dims().to_vec(), expected })
    };
    let outputs = layer.check(OP, NAMES, x, last_dim(OP, "x", x)?)?;
    let &[_, length, _] = x.dims() else {
        return shape("x", x, "[batch, length, inputs]".to_owned());
    };
    match *cos.dims() {
        [_, half] if half > 0 && outputs.is_multiple_of(2 * half) => {
            Ok((length, outputs / (2 * half)))
        }
        [_, half] if half > 0 => {
            shape("weight", layer.weight(), format!("rows that are a multiple of {}", 2 * half))
        }
        _ => shape("cos", cos, "[positions, at least one pair]".to_owned()),
    }
}

fn fused<T: Float>(x: &Tensor, layer: &AffineLayer, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    let layer = layer.contiguous()?;
    let inputs: Vec<_> = [&x].into_iter().chain(layer.tensors()).collect();
    let (batch, length, _) = x.dims3()?;
    let size = 2 * cos.dims()[1];
    let heads = layer.weight().dims()[0] / size;
    let projection = layer.forward::<T>(CpuSlice::new(&x).as_slice()?, n_rows(&x))?;
    let angles = RopeAngles::new(cos, sin)?;
    let y = angles.rotate(&projection, PairLayout::Halves, heads, RotationDirection::Forward)?;
    let float = std::marker::PhantomData::<T>;
    let backward = LinearRope { layer: layer.clone(), angles, float };
    record(&inputs, y, (batch, length, heads, size).into(), backward)
}

struct LinearRope<T> {
    layer: AffineLayer,
    angles: RopeAngles,
    float: std::marker::PhantomData<T>,
}

impl<T: Float> Backward for LinearRope<T> {
    const NAME: &'static str = "fused-linear-rope";

    fn backward(
        &self,
        inputs: &[&Tensor],
        y: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let heads = y.dims()[2];
        let grad_y = CpuSlice::new(grad);
        let projection_grad = self.angles.rotate::<T>(
            grad_y.as_slice()?,
            PairLayout::Halves,
            heads,
            RotationDirection::Back,
        )?;
        self.layer.backward(inputs[0], &projection_grad)
    }
}
