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
        attention::{self, AttentionInputs, AttentionResults, HeadLayout, HeadSlice, ScoreMask},
        float::Float,
    },
    route::{check_positive, check_shape, route},
    weight::parameter_grad,
};

const OP: &str = "attention";

/// Returns softmax(q·kᵀ·scale + mask)·v for each head.
///
/// The number of query heads may be a multiple of the number of key heads. Then that many
/// neighboring query heads share one key and value head (grouped-query attention).
///
/// Scores are computed block by block, and again in the backward pass, so memory grows with the
/// length of the sequences, not with its square. Blocks that a causal mask or a window hides are not
/// computed. [`AttentionConfig`] has the options: padding, mask, window, soft cap and sinks.
///
/// # Shapes
///
/// `query` [batch, queries, heads, size], `key` [batch, keys, key heads, size], `value` [batch,
/// keys, key heads, value size]; the result is [batch, queries, heads, value size]. A view is read
/// in place if the elements of each head are adjacent; otherwise it is copied.
///
/// # Determinism
///
/// On one processor model, results have the same bits for any number of threads, and for a sequence
/// alone or in a batch. Matrix products differ between processor models. The gradient of sinks is
/// summed in f64, over the queries of a sequence and then over the batch.
///
/// # Errors
///
/// [`Shape`](Error::Shape) if shapes do not fit each other or a causal query has no key,
/// [`Gradient`](Error::Gradient) if the mask depends on a variable, [`OutOfRange`](Error::OutOfRange) if
/// a key length is 0 or exceeds the number of keys, if a window is 0 or attention is not causal, or if a
/// soft cap is not a positive number, [`DType`](Error::DType) if the inputs differ in type or have no
/// floating type, [`Device`](Error::Device) if they are on different devices.
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
    check(config, &sizes, query)?;
    route!(
        "attention",
        [query, key, value],
        fused([query, key, value], config),
        composed::attention(query, key, value, config),
    )
}

/// Applies [`attention`](crate::attention()) to queries, keys and values that one projection
/// returns side by side in each row.
///
/// The backward pass writes one gradient for the entire projection. If the projection were sliced
/// instead, it would pad and add three gradients.
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
/// The errors of [`attention`](crate::attention()); [`Shape`](Error::Shape) also if the width of a
/// row is not a multiple of heads + 2 · key heads.
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
    check(config, &sizes, qkv)?;
    route!(
        "attention",
        [qkv],
        fused_packed(qkv, sizes, config),
        composed::attention_packed(qkv, heads, key_heads, config),
    )
}

/// The sizes of inputs with compatible shapes.
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
        if size == 0 {
            return Err(shape("query", query, "a head size of at least 1"));
        }
        if keys == 0 || key_heads == 0 || value_size == 0 {
            let expected = "at least one key, one head and a head size of at least 1";
            return Err(shape("value", value, expected));
        }
        if !heads.is_multiple_of(key_heads) {
            return Err(shape("query", query, &format!("a multiple of {key_heads} heads")));
        }
        Ok(Self { batch, queries, keys, heads, key_heads, size })
    }

    fn new_packed(qkv: &Tensor, heads: usize, key_heads: usize) -> Result<Self> {
        let n_parts = heads + 2 * key_heads;
        let expected =
            format!("[batch, length, a multiple of {n_parts}] with at least one position");
        let shape = || Error::Shape { op: OP, input: "qkv", found: qkv.dims().to_vec(), expected };
        let &[batch, length, width] = qkv.dims() else { return Err(shape()) };
        if key_heads == 0 {
            return Err(Error::out_of_range(OP, "key_heads", &0, "at least 1"));
        }
        if !heads.is_multiple_of(key_heads) {
            let expected = format!("a multiple of {key_heads} key heads");
            return Err(Error::out_of_range(OP, "heads", &heads, expected));
        }
        if length == 0 || width == 0 || !width.is_multiple_of(n_parts) {
            return Err(shape());
        }
        let size = width / n_parts;
        Ok(Self { batch, queries: length, keys: length, heads, key_heads, size })
    }

    /// Returns the shape of the scores.
    fn score_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.keys]
    }
}

/// Checks the options for inputs of these sizes, of which `x` is the first.
fn check(config: &AttentionConfig, sizes: &AttentionSizes, x: &Tensor) -> Result<()> {
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
    if let Some(window) = config.window.filter(|&window| window == 0 || !config.causal) {
        let expected = if config.causal { "at least 1" } else { "absent, as it is not causal" };
        return Err(Error::out_of_range(OP, "the window", &window, expected));
    }
    if let Some(cap) = config.softcap {
        check_positive(OP, "the soft cap", cap)?;
    }
    match &config.sinks {
        Some(sinks) => check_sinks(sinks, sizes, x),
        None => Ok(()),
    }
}

fn check_sinks(sinks: &Tensor, sizes: &AttentionSizes, x: &Tensor) -> Result<()> {
    check_shape(OP, "sinks", sinks, &[sizes.heads])?;
    let [first, other] = [x, sinks].map(|tensor| tensor.device().location());
    if first != other {
        return Err(Error::Device { op: OP, first, other });
    }
    if !sinks.dtype().is_float() {
        let expected = "a floating type";
        return Err(Error::DType { op: OP, input: "sinks", found: sinks.dtype(), expected });
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
            Err(Error::out_of_range(OP, "a key length", &length, expected))
        }
    }
}

fn check_mask(mask: &Tensor, sizes: &AttentionSizes) -> Result<()> {
    if mask.track_op() {
        return Err(Error::gradient(OP, "mask"));
    }
    if mask.broadcast_as(&sizes.score_shape()).is_err() {
        let expected = format!("a shape that broadcasts to {:?}", sizes.score_shape());
        return Err(Error::Shape { op: OP, input: "mask", found: mask.dims().to_vec(), expected });
    }
    Ok(())
}

/// A mask, broadcast to the shape of the scores.
struct BroadcastMask {
    tensor: Tensor,
}

impl BroadcastMask {
    /// Returns the mask of `config`, if there is one.
    fn new<T: Float>(config: &AttentionConfig, shape: [usize; 4]) -> Result<Option<Self>> {
        let Some(mask) = &config.mask else { return Ok(None) };
        Ok(Some(Self { tensor: mask.to_dtype(T::DTYPE)?.broadcast_as(&shape)? }))
    }

    fn strides(&self) -> [usize; 4] {
        let strides = self.tensor.stride();
        [strides[0], strides[1], strides[2], strides[3]]
    }
}

/// Returns the tensor if the elements of its heads are adjacent, otherwise a copy.
fn with_dense_heads(tensor: &Tensor) -> Result<Tensor> {
    if tensor.stride()[3] == 1 { Ok(tensor.clone()) } else { Ok(tensor.contiguous()?) }
}

/// Returns the layout of a tensor [batch, length, heads, size].
fn head_layout(tensor: &Tensor) -> HeadLayout {
    let dims = tensor.dims();
    let strides = tensor.stride();
    HeadLayout {
        offset: 0,
        length: dims[1],
        heads: dims[2],
        size: dims[3],
        batch_stride: strides[0],
        row_stride: strides[1],
        head_stride: strides[2],
    }
}

/// Returns the sinks of `config` in type `T`, if there are any.
fn sinks<T: Float>(config: &AttentionConfig) -> Result<Option<Tensor>> {
    let convert = |sinks: &Tensor| sinks.to_dtype(T::DTYPE)?.contiguous();
    Ok(config.sinks.as_ref().map(convert).transpose()?)
}

/// Calls `compute` with the inputs of the kernels. `inputs` are the query, the key and the value,
/// each with the layout of its heads.
fn with_inputs<T: Float, R>(
    inputs: [(&Tensor, HeadLayout); 3],
    sinks: Option<&Tensor>,
    sizes: &AttentionSizes,
    config: &AttentionConfig,
    compute: impl FnOnce(&AttentionInputs<'_, T>) -> R,
) -> Result<R> {
    let mask = BroadcastMask::new::<T>(config, sizes.score_shape())?;
    let mask_slice = mask.as_ref().map(|mask| CpuSlice::new(&mask.tensor));
    let score_mask = match (&mask, &mask_slice) {
        (Some(mask), Some(slice)) => {
            Some(ScoreMask { data: slice.offset_slice()?, strides: mask.strides() })
        }
        _ => None,
    };
    let [query, key, value] = inputs.map(|(tensor, _)| CpuSlice::new(tensor));
    let [query_layout, key_layout, value_layout] = inputs.map(|(_, layout)| layout);
    let sinks = sinks.map(CpuSlice::new);
    Ok(compute(&AttentionInputs {
        batch: sizes.batch,
        query: HeadSlice { data: query.offset_slice()?, layout: query_layout },
        key: HeadSlice { data: key.offset_slice()?, layout: key_layout },
        value: HeadSlice { data: value.offset_slice()?, layout: value_layout },
        scale: T::round_from_f64(config.scale(sizes.size)),
        causal: config.causal,
        window: config.window,
        key_lengths: config.key_lengths.as_deref(),
        mask: score_mask,
        softcap: config.softcap.map(T::round_from_f64),
        sinks: sinks.as_ref().map(CpuSlice::as_slice).transpose()?,
    }))
}

/// Returns the options that the backward pass needs; the sinks are an input of it.
fn without_sinks(config: &AttentionConfig) -> AttentionConfig {
    AttentionConfig { sinks: None, ..config.clone() }
}

/// Returns the gradient of the sinks, if the operation has this last input.
fn sink_grads<T: Float>(
    sinks: Option<&&Tensor>,
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
) -> Result<Vec<Option<Tensor>>> {
    let grad = |sinks| parameter_grad(sinks, || Ok(attention::backward_sinks(inputs, results)));
    sinks.into_iter().map(|sinks| grad(sinks)).collect()
}

fn fused<T: Float>(inputs: [&Tensor; 3], config: &AttentionConfig) -> Result<Tensor> {
    let [query, key, value] = inputs.map(with_dense_heads);
    let [query, key, value] = [&query?, &key?, &value?];
    let sizes = AttentionSizes::new(query, key, value)?;
    let sinks = sinks::<T>(config)?;
    let layouts = [query, key, value].map(|tensor| (tensor, head_layout(tensor)));
    let (y, log_sums) =
        with_inputs::<T, _>(layouts, sinks.as_ref(), &sizes, config, attention::forward)?;
    let shape = Shape::from((sizes.batch, sizes.queries, sizes.heads, value.dims()[3]));
    let inputs: Vec<_> = [query, key, value].into_iter().chain(&sinks).collect();
    record(&inputs, y, shape, UnpackedAttention { config: without_sinks(config), log_sums })
}

struct UnpackedAttention<T> {
    /// Without sinks, which are an input.
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
        let with_layouts = [0, 1, 2].map(|index| (inputs[index], head_layout(inputs[index])));
        let out = CpuSlice::new(y);
        let out_grad = CpuSlice::new(grad);
        let results = AttentionResults {
            out: out.as_slice()?,
            grad: out_grad.as_slice()?,
            log_sums: &self.log_sums,
        };
        let sinks = inputs.get(3);
        with_inputs::<T, _>(with_layouts, sinks.copied(), &sizes, &self.config, |slices| {
            let input_grads = attention::backward_separate(slices, results);
            let grads = input_grads.into_iter().zip(inputs);
            let mut grads = grads
                .map(|(grad, input)| Ok(Some(cpu_tensor(grad, input.shape())?)))
                .collect::<Result<Vec<_>>>()?;
            grads.extend(sink_grads(sinks, slices, results)?);
            Ok(grads)
        })?
    }
}

/// Returns the layouts of queries, keys and values in packed rows.
fn packed_layouts(sizes: &AttentionSizes) -> [HeadLayout; 3] {
    let AttentionSizes { queries, heads, key_heads, size, .. } = *sizes;
    let width = (heads + 2 * key_heads) * size;
    [
        HeadLayout::packed(queries, heads, size, width, 0),
        HeadLayout::packed(queries, key_heads, size, width, heads * size),
        HeadLayout::packed(queries, key_heads, size, width, (heads + key_heads) * size),
    ]
}

fn fused_packed<T: Float>(
    qkv: &Tensor,
    sizes: AttentionSizes,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let qkv = &qkv.contiguous()?;
    let sinks = sinks::<T>(config)?;
    let layouts = packed_layouts(&sizes).map(|layout| (qkv, layout));
    let (y, log_sums) =
        with_inputs::<T, _>(layouts, sinks.as_ref(), &sizes, config, attention::forward)?;
    let shape = Shape::from((sizes.batch, sizes.queries, sizes.heads * sizes.size));
    let inputs: Vec<_> = [qkv].into_iter().chain(&sinks).collect();
    record(&inputs, y, shape, PackedAttention { sizes, config: without_sinks(config), log_sums })
}

struct PackedAttention<T> {
    sizes: AttentionSizes,
    /// Without sinks, which are an input.
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
        let qkv = inputs[0];
        let with_layouts = packed_layouts(&self.sizes).map(|layout| (qkv, layout));
        let out = CpuSlice::new(y);
        let out_grad = CpuSlice::new(grad);
        let results = AttentionResults {
            out: out.as_slice()?,
            grad: out_grad.as_slice()?,
            log_sums: &self.log_sums,
        };
        let sinks = inputs.get(1);
        with_inputs::<T, _>(with_layouts, sinks.copied(), &self.sizes, &self.config, |slices| {
            let grad = attention::backward_packed(slices, results, qkv.elem_count());
            let mut grads = vec![Some(cpu_tensor(grad, qkv.shape())?)];
            grads.extend(sink_grads(sinks, slices, results)?);
            Ok(grads)
        })?
    }
}
