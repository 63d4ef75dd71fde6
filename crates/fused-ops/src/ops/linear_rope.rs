//! A projection to queries or keys in one step: a linear layer with a rotated result.

use candle_core::Tensor;

use crate::{
    autograd::{Backward, CpuSlice, record},
    composed,
    error::{Error, Result},
    kernels::{
        float::Float,
        rope::{PairLayout, RotationDirection},
    },
    ops::{
        linear::{AffineLayer, check_layer, n_rows},
        rope::{RopeAngles, check_angles},
    },
    route::{last_dim, route},
};

const OP: &str = "linear_rope";

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
    let (length, heads) = check(x, weight, bias, cos)?;
    let half = cos.dims()[1];
    check_angles(OP, ("cos", cos), length, half)?;
    check_angles(OP, ("sin", sin), length, half)?;
    let cos = &cos.narrow(0, 0, length)?;
    let sin = &sin.narrow(0, 0, length)?;
    let Some(bias) = bias else {
        return route!(
            "linear_rope",
            [x, weight, cos, sin],
            fused(&[x, weight], cos, sin),
            composed::linear_rope([x, weight, cos, sin], None, heads),
        );
    };
    route!(
        "linear_rope",
        [x, weight, bias, cos, sin],
        fused(&[x, weight, bias], cos, sin),
        composed::linear_rope([x, weight, cos, sin], Some(bias), heads),
    )
}

/// Checks the shapes, and returns the number of positions and the number of heads.
fn check(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    cos: &Tensor,
) -> Result<(usize, usize)> {
    let shape = |input, tensor: &Tensor, expected: String| {
        Err(Error::Shape { op: OP, input, found: tensor.dims().to_vec(), expected })
    };
    let outputs = check_layer(OP, ("weight", weight), ("bias", bias), last_dim(OP, "x", x)?)?;
    let &[_, length, _] = x.dims() else {
        return shape("x", x, "[batch, length, inputs]".to_owned());
    };
    match *cos.dims() {
        [_, half] if half > 0 && outputs.is_multiple_of(2 * half) => {
            Ok((length, outputs / (2 * half)))
        }
        [_, half] if half > 0 => {
            shape("weight", weight, format!("rows that are a multiple of {}", 2 * half))
        }
        _ => shape("cos", cos, "[positions, at least one pair]".to_owned()),
    }
}

/// Projects and rotates. `inputs` are x, the weight and, if there is one, the bias.
fn fused<T: Float>(inputs: &[&Tensor], cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let contiguous: Vec<_> =
        inputs.iter().map(|input| input.contiguous()).collect::<Result<_, _>>()?;
    let inputs: Vec<_> = contiguous.iter().collect();
    let affine = AffineLayer::new(inputs[1], inputs.get(2).copied());
    let (batch, length, _) = inputs[0].dims3()?;
    let size = 2 * cos.dims()[1];
    let heads = inputs[1].dims()[0] / size;
    let projection =
        affine.forward::<T>(CpuSlice::new(inputs[0]).as_slice()?, n_rows(inputs[0]))?;
    let angles = RopeAngles::new(cos, sin)?;
    let y = angles.rotate(&projection, PairLayout::Halves, heads, RotationDirection::Forward)?;
    let float = std::marker::PhantomData::<T>;
    record(&inputs, y, (batch, length, heads, size).into(), LinearRope { angles, float })
}

struct LinearRope<T> {
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
        let x = inputs[0];
        let heads = y.dims()[2];
        let grad_y = CpuSlice::new(grad);
        let projection_grad = self.angles.rotate::<T>(
            grad_y.as_slice()?,
            PairLayout::Halves,
            heads,
            RotationDirection::Back,
        )?;
        AffineLayer::new(inputs[1], inputs.get(2).copied()).backward(x, &projection_grad)
    }
}
