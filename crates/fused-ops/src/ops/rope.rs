//! Rotary position embeddings, in both conventions and both layouts.
//!
//! Su et al., "RoFormer", arXiv 2104.09864. The functions have the names and arguments of
//! `candle_nn::rotary_emb`, whose fused functions are not differentiable.

use candle_core::Tensor;
use candle_nn::rotary_emb;

use crate::{
    autograd::{CpuSlice, record_unary},
    composed,
    error::{Error, Result},
    kernels::{
        float::Float,
        rope::{PairLayout, Rotation, RotationDirection, rotate},
    },
    route::route,
};

const OP: &str = "rope";

/// Rotates each pair of elements by the angle of its position. A pair is an element of the first
/// half of a head and the element at the same index of the second half, as in Llama and GPT-NeoX.
///
/// If `cos` and `sin` have fewer pairs than half of a head has elements, only the first 2 · pairs
/// elements of each head are turned, and the others pass unchanged (the partial rotation of Phi, by
/// `partial_rotary_factor`).
///
/// # Shapes
///
/// `x` [batch, heads, length, size], `cos` and `sin` [at least length, pairs], with pairs from 1 to size /
/// 2; the result has the shape of `x`.
///
/// # Determinism
///
/// The same bits on every processor and for any number of threads.
///
/// # Errors
///
/// [`Shape`](Error::Shape) if the shapes do not fit, [`Gradient`](Error::Gradient) if `cos` or
/// `sin` depends on a variable, [`DType`](Error::DType) and [`Device`](Error::Device) if the inputs
/// differ in type or device or have no floating type.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// // One head of size 4, turned by a quarter at its only position: (a, b) becomes (−b, a).
/// let x = Tensor::new(&[[[[1.0_f32, 2.0, 3.0, 4.0]]]], &Device::Cpu)?;
/// let (cos, sin) = (Tensor::new(&[[0.0_f32, 0.0]], &Device::Cpu)?, Tensor::new(&[[1.0_f32, 1.0]], &Device::Cpu)?);
/// let halves = fused_ops::rope(&x, &cos, &sin)?;
/// assert_eq!(halves.flatten_all()?.to_vec1::<f32>()?, [-3.0, -4.0, 1.0, 2.0]);
/// let neighbors = fused_ops::rope_i(&x, &cos, &sin)?;
/// assert_eq!(neighbors.flatten_all()?.to_vec1::<f32>()?, [-2.0, 1.0, -4.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate_heads(x, cos, sin, PairLayout::Halves, RowLayout::HeadsFirst)
}

/// Rotates like [`rope`](crate::rope()), but a pair is two neighboring elements, as in GPT-J and
/// the original paper.
///
/// # Shapes
///
/// Like [`rope`](crate::rope()).
///
/// # Determinism
///
/// Like [`rope`](crate::rope()).
///
/// # Errors
///
/// The errors of [`rope`](crate::rope()).
///
/// # Examples
///
/// See [`rope`](crate::rope()).
pub fn rope_i(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate_heads(x, cos, sin, PairLayout::Neighbors, RowLayout::HeadsFirst)
}

/// Rotates like [`rope`](crate::rope()), with the heads of a position next to each other, as
/// [`attention`](crate::attention()) takes them.
///
/// # Shapes
///
/// `x` [batch, length, heads, size], `cos` and `sin` [at least length, pairs], with pairs from 1 to size /
/// 2; the result has the shape of `x`.
///
/// # Determinism
///
/// Like [`rope`](crate::rope()).
///
/// # Errors
///
/// The errors of [`rope`](crate::rope()).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// // Two heads of size 2 at one position, turned by a quarter.
/// let x = Tensor::new(&[[[[1.0_f32, 2.0], [3.0, 4.0]]]], &Device::Cpu)?;
/// let (cos, sin) = (Tensor::new(&[[0.0_f32]], &Device::Cpu)?, Tensor::new(&[[1.0_f32]], &Device::Cpu)?);
/// let y = fused_ops::rope_thd(&x, &cos, &sin)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [-2.0, 1.0, -4.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn rope_thd(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate_heads(x, cos, sin, PairLayout::Halves, RowLayout::PositionsFirst)
}

/// Rotates neighboring elements like [`rope_i`](crate::rope_i), with the heads of a position next to each
/// other, as [`attention`](crate::attention()) takes them: the rotation of GLM-4.
///
/// # Shapes
///
/// Like [`rope_thd`](crate::rope_thd).
///
/// # Determinism
///
/// Like [`rope`](crate::rope()).
///
/// # Errors
///
/// The errors of [`rope`](crate::rope()).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// // A head of size 4 at one position, whose only pair is turned by a quarter.
/// let x = Tensor::new(&[[[[1.0_f32, 2.0, 3.0, 4.0]]]], &Device::Cpu)?;
/// let (cos, sin) = (Tensor::new(&[[0.0_f32]], &Device::Cpu)?, Tensor::new(&[[1.0_f32]], &Device::Cpu)?);
/// let y = fused_ops::rope_i_thd(&x, &cos, &sin)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [-2.0, 1.0, 3.0, 4.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn rope_i_thd(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate_heads(x, cos, sin, PairLayout::Neighbors, RowLayout::PositionsFirst)
}

/// The order of the two dimensions between batch and size.
#[derive(Clone, Copy, Debug)]
enum RowLayout {
    HeadsFirst,
    PositionsFirst,
}

fn rotate_heads(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    pairs: PairLayout,
    rows: RowLayout,
) -> Result<Tensor> {
    let (length, half) = check_x(x, rows)?;
    check_angles(OP, [cos, sin], length, half)?;
    let rotate = match (pairs, rows) {
        (PairLayout::Neighbors, RowLayout::HeadsFirst) => rotary_emb::rope_i,
        (PairLayout::Neighbors, RowLayout::PositionsFirst) => composed::rope_i_thd,
        (PairLayout::Halves, RowLayout::HeadsFirst) => rotary_emb::rope,
        (PairLayout::Halves, RowLayout::PositionsFirst) => rotary_emb::rope_thd,
    };
    let cos = &cos.narrow(0, 0, length)?;
    let sin = &sin.narrow(0, 0, length)?;
    route!(
        "rope",
        [x, cos, sin],
        fused(x, cos, sin, pairs, rows),
        composed::rope(x, cos, sin, rotate),
    )
}

/// Checks the shape of `x`, and returns the number of positions and the most pairs of a head.
fn check_x(x: &Tensor, rows: RowLayout) -> Result<(usize, usize)> {
    match *x.dims() {
        [_, first, second, size] if size.is_multiple_of(2) => Ok(match rows {
            RowLayout::HeadsFirst => (second, size / 2),
            RowLayout::PositionsFirst => (first, size / 2),
        }),
        _ => {
            let expected = "four dimensions, the last of them even".to_owned();
            Err(Error::Shape { op: OP, input: "x", found: x.dims().to_vec(), expected })
        }
    }
}

/// Checks the cosines and sines of at least `length` positions, with at most `half` pairs each.
pub(crate) fn check_angles(
    op: &'static str,
    [cos, sin]: [&Tensor; 2],
    length: usize,
    half: usize,
) -> Result<()> {
    let n_pairs = cos.dims().last().copied().unwrap_or_default();
    for (input, angles, least, most) in
        [("cos", cos, half.min(1), half), ("sin", sin, n_pairs, n_pairs)]
    {
        if angles.track_op() {
            return Err(Error::gradient(op, input));
        }
        let fits = matches!(*angles.dims(), [positions, pairs]
            if positions >= length && (least..=most).contains(&pairs));
        if !fits {
            let expected = format!("[at least {length}, {least} to {most}]");
            return Err(Error::Shape { op, input, found: angles.dims().to_vec(), expected });
        }
    }
    Ok(())
}

fn fused<T: Float>(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    pairs: PairLayout,
    rows: RowLayout,
) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let rows_per_position = match rows {
        RowLayout::HeadsFirst => 1,
        RowLayout::PositionsFirst => x.dims()[2],
    };
    let rotation = HeadRotation::new(cos, sin, pairs, rows_per_position, x.dims()[3])?;
    let y = rotation.rotate::<T>(CpuSlice::new(x).as_slice()?, RotationDirection::Forward)?;
    record_unary(x, y, x.shape().clone(), move |_, _, grad| {
        rotation.rotate(grad, RotationDirection::Back)
    })
}

/// The rotation of heads by contiguous cosines and sines [positions, pairs].
pub(crate) struct HeadRotation {
    cos: Tensor,
    sin: Tensor,
    layout: PairLayout,
    /// The number of consecutive heads with the same position.
    rows_per_position: usize,
    /// The number of elements of a head.
    size: usize,
}

impl HeadRotation {
    pub(crate) fn new(
        cos: &Tensor,
        sin: &Tensor,
        layout: PairLayout,
        rows_per_position: usize,
        size: usize,
    ) -> Result<Self> {
        let (cos, sin) = (cos.contiguous()?, sin.contiguous()?);
        Ok(Self { cos, sin, layout, rows_per_position, size })
    }

    /// Rotates all heads of `x`.
    pub(crate) fn rotate<T: Float>(&self, x: &[T], direction: RotationDirection) -> Result<Vec<T>> {
        let (positions, pairs) = self.cos.dims2()?;
        let cos = CpuSlice::new(&self.cos);
        let sin = CpuSlice::new(&self.sin);
        let rotation = Rotation {
            layout: self.layout,
            size: self.size,
            pairs,
            rows_per_position: self.rows_per_position,
            positions,
            cos: cos.as_slice()?,
            sin: sin.as_slice()?,
        };
        Ok(rotate(x, rotation, direction))
    }
}
