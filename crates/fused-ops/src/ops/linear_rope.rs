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
    ops::rope::{HeadRotation, check_angles},
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
/// `x` [batch, length, inputs], `weight` [heads · `head_size`, inputs], `bias` [heads · `head_size`], `cos`
/// and `sin` [at least length, pairs], with pairs from 1 to `head_size` / 2; the result is [batch, length,
/// heads, `head_size`].
///
/// # Determinism
///
/// Like [`linear`](crate::linear()). In `f32` and `f64` the result has the same bits as the two
/// operations. In `f16` and `bf16` the fused kernels round once, and the two operations twice.
///
/// # Errors
///
/// The errors of [`linear`](crate::linear()) and [`rope_thd`](crate::rope_thd); [`Shape`](Error::Shape) also
/// if the number of outputs is not a multiple of `head_size`.
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
/// let y = linear_rope(&x, &weight, None, 2, &cos, &sin)?;
/// assert_eq!(y.dims(), [1, 1, 1, 2]);
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [-2.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn linear_rope(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    head_size: usize,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<Tensor> {
    apply(x, &AffineLayer::new(weight, bias), head_size, [cos, sin])
}

/// Projects by a layer with or without an adapter, and rotates.
pub(crate) fn apply(
    x: &Tensor,
    layer: &AffineLayer,
    head_size: usize,
    [cos, sin]: [&Tensor; 2],
) -> Result<Tensor> {
    let (length, heads) = check(x, layer, head_size)?;
    check_angles(OP, [cos, sin], length, head_size / 2)?;
    let cos = &cos.narrow(0, 0, length)?;
    let sin = &sin.narrow(0, 0, length)?;
    let inputs = [("x", x), ("cos", cos), ("sin", sin)].into_iter().chain(layer.named(NAMES));
    match Route::new(OP, &inputs.collect::<Vec<_>>())? {
        Route::F32 => fused::<f32>(x, layer, heads, [cos, sin]),
        Route::F64 => fused::<f64>(x, layer, heads, [cos, sin]),
        Route::Half(half) => {
            let [x, cos, sin] = [x, cos, sin].map(|tensor| tensor.to_dtype(DType::F32));
            Ok(fused::<f32>(&x?, &layer.to_f32()?, heads, [&cos?, &sin?])?.to_dtype(half)?)
        }
        Route::Composed => Ok(composed::split_and_rotate(&layer.composed(x)?, heads, cos, sin)?),
    }
}

/// Checks the shapes, and returns the number of positions and the number of heads.
fn check(x: &Tensor, layer: &AffineLayer, head_size: usize) -> Result<(usize, usize)> {
    let shape = |input, tensor: &Tensor, expected: String| {
        Err(Error::Shape { op: OP, input, found: tensor.dims().to_vec(), expected })
    };
    let outputs = layer.check(OP, NAMES, x, last_dim(OP, "x", x)?)?;
    let &[_, length, _] = x.dims() else {
        return shape("x", x, "[batch, length, inputs]".to_owned());
    };
    if head_size < 2 || head_size % 2 == 1 {
        let expected = "even, and at least 2";
        return Err(Error::out_of_range(OP, "the size of a head", &head_size, expected));
    }
    if !outputs.is_multiple_of(head_size) {
        return shape("weight", layer.weight(), format!("rows that are a multiple of {head_size}"));
    }
    Ok((length, outputs / head_size))
}

fn fused<T: Float>(
    x: &Tensor,
    layer: &AffineLayer,
    heads: usize,
    [cos, sin]: [&Tensor; 2],
) -> Result<Tensor> {
    let x = x.contiguous()?;
    let layer = layer.contiguous()?;
    let inputs: Vec<_> = [&x].into_iter().chain(layer.tensors()).collect();
    let (batch, length, _) = x.dims3()?;
    let size = layer.weight().dims()[0] / heads.max(1);
    let projection = layer.forward::<T>(CpuSlice::new(&x).as_slice()?, n_rows(&x))?;
    let rotation = HeadRotation::new(cos, sin, PairLayout::Halves, heads, size)?;
    let y = rotation.rotate(&projection, RotationDirection::Forward)?;
    let float = std::marker::PhantomData::<T>;
    let backward = LinearRope { layer: layer.clone(), rotation, float };
    record(&inputs, y, (batch, length, heads, size).into(), backward)
}

struct LinearRope<T> {
    layer: AffineLayer,
    rotation: HeadRotation,
    float: std::marker::PhantomData<T>,
}

impl<T: Float> Backward for LinearRope<T> {
    const NAME: &'static str = "fused-linear-rope";

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let grad_y = CpuSlice::new(grad);
        let projection_grad =
            self.rotation.rotate::<T>(grad_y.as_slice()?, RotationDirection::Back)?;
        self.layer.backward(inputs[0], &projection_grad)
    }
}
