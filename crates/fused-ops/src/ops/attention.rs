//! Attention that keeps no matrix of scores, forward and back.
//!
//! The algorithm is FlashAttention's (Dao et al., arXiv 2205.14135), on a processor; heads may be
//! grouped as in Ainslie et al., "GQA", arXiv 2305.13245.

use candle_core::{Shape, Tensor};

use crate::{
    autograd::{Backward, CpuSlice, cpu_tensor, record},
    composed,
    config::AttentionConfig,
    error::{Error, Result},
    kernels::{
        attention::{self, AttentionInputs, AttentionResults, HeadLayout, ScoreMask},
        float::Float,
    },
    route::{check_shape, route},
};

const OP: &str = "attention";

/// Returns softmax(q·kᵀ·scale + mask)·v for each head.
///
/// The queries may have several times as many heads as keys and values: then as many neighboring
/// heads share one.
///
/// The scores exist in blocks only, each for as long as it is needed, and are computed again on the
/// backward pass: memory grows with the length of the sequences, not with its square. Blocks that a
/// causal mask hides are not computed.
///
/// # Shapes
///
/// `query` [batch, queries, heads, size], `key` [batch, keys, key heads, size], `value` [batch,
/// keys, key heads, value size]; the result is [batch, queries, heads, value size]. Views with any
/// strides are read in place if the elements of a head are neighbors.
///
/// # Determinism
///
/// The same bits for any number of threads, and for a sequence alone as in a batch; on one
/// processor model, since matrix products differ between them.
///
/// # Errors
///
/// [`Shape`](Error::Shape) if shapes do not fit each other or a causal query has no key,
/// [`Gradient`](Error::Gradient) if the mask depends on a variable, [`Setting`](Error::Setting) if
/// a sequence has no key or more than there are, [`DType`](Error::DType) and
/// [`Device`](Error::Device) if the inputs differ in type or device or have no floating type.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fused_ops::{AttentionConfig, attention};
///
/// // Two positions, one head of size 1: the first sees itself, the second both, with equal scores.
/// let query = Var::zeros((1, 2, 1, 1), candle_core::DType::F32, &Device::Cpu)?;
/// let value = Tensor::new(&[10.0_f32, 20.0], &Device::Cpu)?.reshape((1, 2, 1, 1))?;
/// let y = attention(&query, &query, &value, &AttentionConfig::causal())?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [10.0, 15.0]);
/// assert!(y.sum_all()?.backward()?.get(&query).is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let sizes = AttentionSizes::new(query, key, value)?;
    check(config, &sizes)?;
    route!(
        "attention",
        [query, key, value],
        unpacked(query, key, value, config),
        composed::attention(query, key, value, config),
    )
}

/// Applies [`attention`](crate::attention()) to the queries, keys and values of one projection, which
/// are next to each other in each row.
///
/// Its backward writes one gradient of the projection. Cutting the projection instead would need
/// three pads and additions.
///
/// # Shapes
///
/// `qkv` [batch, length, (heads + 2 · key heads) · size]: the queries of all heads, then the keys,
/// then the values. The result is [batch, length, heads · size].
///
/// # Determinism
///
/// The same bits as [`attention`](crate::attention()).
///
/// # Errors
///
/// The errors of [`attention`](crate::attention()); [`Shape`](Error::Shape) also if the rows do not split
/// into so many heads.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fused_ops::{AttentionConfig, attention_packed};
///
/// // Two positions; query, key and value of one head of size 1.
/// let qkv = Tensor::new(&[[[0.0_f32, 0.0, 10.0], [0.0, 0.0, 20.0]]], &Device::Cpu)?;
/// let y = attention_packed(&qkv, 1, 1, &AttentionConfig::causal())?;
/// assert_eq!(y.to_vec3::<f32>()?, [[[10.0], [15.0]]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attention_packed(
    qkv: &Tensor,
    heads: usize,
    key_heads: usize,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let sizes = AttentionSizes::new_packed(qkv, heads, key_heads)?;
    check(config, &sizes)?;
    route!(
        "attention",
        [qkv],
        packed(qkv, sizes, config),
        composed::attention_packed(qkv, heads, key_heads, config),
    )
}

/// The sizes of the inputs, which fit each other.
#[derive(Clone, Copy, Debug)]
struct AttentionSizes {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    key_heads: usize,
    size: usize,
}

impl AttentionSizes {
    fn new(query: &Tensor, key: &Tensor, value: &Tensor) -> Result<Self> {
        let shape = |input, tensor: &Tensor, expected: &str| {
            let found = tensor.dims().to_vec();
            let expected = expected.to_owned();
            Error::Shape { op: OP, input, found, expected }
        };
        let &[batch, queries, heads, size] = query.dims() else {
            return Err(shape("query", query, "[batch, queries, heads, size]"));
        };
        let &[_, keys, key_heads, value_size] = value.dims() else {
            return Err(shape("value", value, "[batch, keys, key heads, value size]"));
        };
        check_shape(OP, "key", key, &[batch, keys, key_heads, size])?;
        check_shape(OP, "value", value, &[batch, keys, key_heads, value_size])?;
        if keys == 0 || size == 0 || value_size == 0 {
            return Err(shape("value", value, "at least one key and a head size of at least 1"));
        }
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            return Err(shape("query", query, &format!("a multiple of {key_heads} heads")));
        }
        Ok(Self { batch, queries, keys, heads, key_heads, size })
    }

    fn new_packed(qkv: &Tensor, heads: usize, key_heads: usize) -> Result<Self> {
        let parts = heads + 2 * key_heads;
        let expected = format!("[batch, length, a multiple of {parts}] with at least one position");
        let shape = || Error::Shape { op: OP, input: "qkv", found: qkv.dims().to_vec(), expected };
        let &[batch, length, width] = qkv.dims() else { return Err(shape()) };
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            let expected = format!("a multiple of {key_heads} key heads, which must be at least 1");
            return Err(Error::Setting { op: OP, name: "heads", value: heads as f64, expected });
        }
        if length == 0 || width == 0 || !width.is_multiple_of(parts) {
            return Err(shape());
        }
        let size = width / parts;
        Ok(Self { batch, queries: length, keys: length, heads, key_heads, size })
    }

    fn scores(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.keys]
    }
}

fn check(config: &AttentionConfig, sizes: &AttentionSizes) -> Result<()> {
    if config.causal && sizes.queries > sizes.keys {
        let expected = format!("no more than {} queries, since it is causal", sizes.keys);
        let found = vec![sizes.batch, sizes.queries, sizes.heads, sizes.size];
        return Err(Error::Shape { op: OP, input: "query", found, expected });
    }
    if let Some(lengths) = &config.key_lengths {
        check_lengths(lengths, sizes)?;
    }
    if let Some(mask) = &config.mask {
        check_mask(mask, sizes)?;
    }
    Ok(())
}

fn check_lengths(lengths: &[usize], sizes: &AttentionSizes) -> Result<()> {
    if lengths.len() != sizes.batch {
        let expected = format!("[{}], one for each sequence", sizes.batch);
        return Err(Error::Shape {
            op: OP,
            input: "key_lengths",
            found: vec![lengths.len()],
            expected,
        });
    }
    match lengths.iter().find(|&length| !(1..=sizes.keys).contains(length)) {
        None => Ok(()),
        Some(&length) => {
            let expected = format!("from 1 to {}", sizes.keys);
            Err(Error::Setting { op: OP, name: "a key length", value: length as f64, expected })
        }
    }
}

fn check_mask(mask: &Tensor, sizes: &AttentionSizes) -> Result<()> {
    if mask.track_op() {
        return Err(Error::Gradient { op: OP, input: "mask" });
    }
    if mask.broadcast_as(&sizes.scores()).is_err() {
        let expected = format!("a shape that broadcasts to {:?}", sizes.scores());
        return Err(Error::Shape { op: OP, input: "mask", found: mask.dims().to_vec(), expected });
    }
    Ok(())
}

/// A mask with an element, if only a shared one, for each score.
struct ScoreShape {
    mask: Tensor,
}

impl ScoreShape {
    fn new<T: Float>(config: &AttentionConfig, shape: [usize; 4]) -> Result<Option<Self>> {
        let Some(mask) = &config.mask else { return Ok(None) };
        Ok(Some(Self { mask: mask.to_dtype(T::DTYPE)?.broadcast_as(&shape)? }))
    }

    fn strides(&self) -> [usize; 4] {
        let stride = self.mask.stride();
        [stride[0], stride[1], stride[2], stride[3]]
    }
}

/// Returns the tensor if the elements of its heads are adjacent, otherwise a copy.
fn with_dense_heads(tensor: &Tensor) -> Result<Tensor> {
    if tensor.stride()[3] == 1 { Ok(tensor.clone()) } else { Ok(tensor.contiguous()?) }
}

/// Returns the layout of [batch, length, heads, size].
fn heads(tensor: &Tensor) -> HeadLayout {
    let dims = tensor.dims();
    let stride = tensor.stride();
    HeadLayout {
        offset: 0,
        length: dims[1],
        count: dims[2],
        size: dims[3],
        batch_stride: stride[0],
        row_stride: stride[1],
        head_stride: stride[2],
    }
}

/// Calls `compute` with the inputs of the kernels.
fn with_inputs<T: Float, R>(
    [query, key, value]: [(&Tensor, HeadLayout); 3],
    sizes: &AttentionSizes,
    config: &AttentionConfig,
    compute: impl FnOnce(&AttentionInputs<'_, T>) -> R,
) -> Result<R> {
    let scores = ScoreShape::new::<T>(config, sizes.scores())?;
    let mask_read = scores.as_ref().map(|scores| CpuSlice::new(&scores.mask));
    let mask = match (&scores, &mask_read) {
        (Some(scores), Some(read)) => {
            Some(ScoreMask { data: read.offset_slice()?, strides: scores.strides() })
        }
        _ => None,
    };
    let read = [CpuSlice::new(query.0), CpuSlice::new(key.0), CpuSlice::new(value.0)];
    Ok(compute(&AttentionInputs {
        batch: sizes.batch,
        query: (read[0].offset_slice()?, query.1),
        key: (read[1].offset_slice()?, key.1),
        value: (read[2].offset_slice()?, value.1),
        scale: T::round_from_f64(config.scale(sizes.size)),
        causal: config.causal,
        key_lengths: config.key_lengths.as_deref(),
        mask,
    }))
}

fn unpacked<T: Float>(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let query = &with_dense_heads(query)?;
    let key = &with_dense_heads(key)?;
    let value = &with_dense_heads(value)?;
    let sizes = AttentionSizes::new(query, key, value)?;
    let inputs = [(query, heads(query)), (key, heads(key)), (value, heads(value))];
    let (y, log_sums) = with_inputs::<T, _>(inputs, &sizes, config, attention::forward)?;
    let shape = Shape::from((sizes.batch, sizes.queries, sizes.heads, value.dims()[3]));
    record(&[query, key, value], y, shape, UnpackedAttention { config: config.clone(), log_sums })
}

struct UnpackedAttention<T> {
    config: AttentionConfig,
    log_sums: Vec<T>,
}

impl<T: Float> Backward for UnpackedAttention<T> {
    const NAME: &'static str = "fused-attention";

    fn backward(
        &self,
        inputs: &[&Tensor],
        y: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let sizes = AttentionSizes::new(inputs[0], inputs[1], inputs[2])?;
        let located = [0, 1, 2].map(|index| (inputs[index], heads(inputs[index])));
        let out = CpuSlice::new(y);
        let grad = CpuSlice::new(grad);
        let results = AttentionResults {
            out: out.as_slice()?,
            grad: grad.as_slice()?,
            log_sums: &self.log_sums,
        };
        let grads = with_inputs::<T, _>(located, &sizes, &self.config, |inputs| {
            attention::backward_separate(inputs, results)
        })?;
        grads
            .into_iter()
            .zip(inputs)
            .map(|(grad, x)| Ok(Some(cpu_tensor(grad, x.shape())?)))
            .collect()
    }
}

/// Returns the layouts of queries, keys and values in packed rows.
fn packed_heads(sizes: &AttentionSizes) -> [HeadLayout; 3] {
    let AttentionSizes { queries, heads, key_heads, size, .. } = *sizes;
    let width = (heads + 2 * key_heads) * size;
    [
        HeadLayout::packed(queries, heads, size, width, 0),
        HeadLayout::packed(queries, key_heads, size, width, heads * size),
        HeadLayout::packed(queries, key_heads, size, width, (heads + key_heads) * size),
    ]
}

fn packed<T: Float>(
    qkv: &Tensor,
    sizes: AttentionSizes,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let qkv = &qkv.contiguous()?;
    let located = packed_heads(&sizes).map(|heads| (qkv, heads));
    let (y, log_sums) = with_inputs::<T, _>(located, &sizes, config, attention::forward)?;
    let shape = Shape::from((sizes.batch, sizes.queries, sizes.heads * sizes.size));
    record(&[qkv], y, shape, PackedAttention { sizes, config: config.clone(), log_sums })
}

struct PackedAttention<T> {
    sizes: AttentionSizes,
    config: AttentionConfig,
    log_sums: Vec<T>,
}

impl<T: Float> Backward for PackedAttention<T> {
    const NAME: &'static str = "fused-attention-packed";

    fn backward(
        &self,
        inputs: &[&Tensor],
        y: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let located = packed_heads(&self.sizes).map(|heads| (inputs[0], heads));
        let out = CpuSlice::new(y);
        let grad = CpuSlice::new(grad);
        let results = AttentionResults {
            out: out.as_slice()?,
            grad: grad.as_slice()?,
            log_sums: &self.log_sums,
        };
        let grad = with_inputs::<T, _>(located, &self.sizes, &self.config, |inputs| {
            attention::backward_packed(inputs, results, located[0].0.elem_count())
        })?;
        Ok(vec![Some(cpu_tensor(grad, inputs[0].shape())?)])
    }
}
