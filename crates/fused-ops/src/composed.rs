//! The operations of this crate, composed of candle's operations.
//!
//! They run on devices without kernels of this crate. There most operations take as long as their
//! passes over memory, and candle's own backward makes many passes: for each intermediate tensor it
//! keeps a gradient and adds it to zeros. So larger operations have their own backward here, with few
//! passes. Inputs in half precision are converted to f32 first, except for those of matrix products,
//! and a result is rounded back once: in half precision, squares would overflow and sums would lose
//! small terms.
//!
//! The arguments are the same as for the functions with the same names at the root of the crate.
//! Those functions check them.

use candle_core::{D, DType, Device, Result as CandleResult, Tensor};
use candle_nn::ops::softmax_last_dim;

use crate::{
    autograd::scalar_with_grad,
    config::{Activation, AttentionConfig},
    custom::with_backward,
    error::Result,
    kernels::{
        attention::VisibleKeys,
        cross_entropy::RowTarget,
        dropout::{self, DropSpec},
        norm::Norm,
    },
};

/// Converts half precision to f32.
fn widen(x: &Tensor) -> CandleResult<Tensor> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32),
        _ => Ok(x.clone()),
    }
}

pub(crate) fn norm(
    form: Norm,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    epsilon: f64,
) -> Result<Tensor> {
    let inputs: Vec<_> = [x, weight].into_iter().chain(bias).collect();
    let (is_frozen, weight_dtype) = (!weight.track_op(), weight.dtype());
    let has_bias = bias.is_some();
    let (x, weight) = (x.detach(), weight.detach());
    let (normalized, _) = normalize(form, &widen(&x)?, epsilon)?;
    let mut y = normalized.broadcast_mul(&widen(&weight)?)?;
    if let Some(bias) = bias {
        y = y.broadcast_add(&widen(&bias.detach())?)?;
    }
    with_backward(&inputs, &y.to_dtype(x.dtype())?, move |_, grad| {
        let (grad, weight) = (widen(&grad)?, widen(&weight)?);
        let (normalized, scale) = normalize(form, &widen(&x)?, epsilon)?;
        let grad_normalized = grad.broadcast_mul(&weight)?;
        let mean_product = (&grad_normalized * &normalized)?.mean_keepdim(D::Minus1)?;
        let mut grad_x = (&grad_normalized - normalized.broadcast_mul(&mean_product)?)?;
        if let Norm::Layer = form {
            grad_x = grad_x.broadcast_sub(&grad_normalized.mean_keepdim(D::Minus1)?)?;
        }
        let mut grads = vec![Some(grad_x.broadcast_mul(&scale)?.to_dtype(x.dtype())?)];
        let grad_weight =
            (!is_frozen).then(|| sum_rows(&(&grad * normalized)?)?.to_dtype(weight_dtype));
        grads.push(grad_weight.transpose()?);
        if has_bias {
            grads.push(Some(sum_rows(&grad)?.to_dtype(x.dtype())?));
        }
        Ok(grads)
    })
}

/// Returns x · s and s, where s = 1 / √(mean of x² + epsilon). [`Norm::Layer`] first subtracts the mean
/// from x.
fn normalize(form: Norm, x: &Tensor, epsilon: f64) -> CandleResult<(Tensor, Tensor)> {
    let x = match form {
        Norm::Rms => x.clone(),
        Norm::Layer => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
    };
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + epsilon)?.sqrt()?.recip()?;
    Ok((x.broadcast_mul(&scale)?, scale))
}

/// Adds up all rows of the last dimension.
fn sum_rows(x: &Tensor) -> CandleResult<Tensor> {
    x.reshape(((), x.dim(D::Minus1)?))?.sum(0)
}

pub(crate) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    activation: Option<Activation>,
) -> CandleResult<Tensor> {
    let y = x.broadcast_matmul(&weight.t()?)?;
    let y = match bias {
        Some(bias) => y.broadcast_add(bias)?,
        None => y,
    };
    match activation {
        Some(form) => self::activation(&y, form),
        None => Ok(y),
    }
}

pub(crate) fn activation(x: &Tensor, activation: Activation) -> CandleResult<Tensor> {
    let dtype = x.dtype();
    let x = widen(x)?;
    let y = match activation {
        Activation::Relu => x.relu(),
        // Not `gelu_erf`: a constant in its gradient has only six digits.
        Activation::Gelu => (&x * 0.5)? * ((&x * std::f64::consts::FRAC_1_SQRT_2)?.erf()? + 1.0)?,
        Activation::GeluTanh => {
            let inner = (&x + (x.powf(3.0)? * 0.044_715)?)?;
            (&x * 0.5)? * ((inner * 0.797_884_560_802_865_4)?.tanh()? + 1.0)?
        }
        // Not `x / (exp(-x) + 1)`: its gradient is NaN where exp(-x) overflows.
        Activation::Silu => x.silu(),
    };
    y?.to_dtype(dtype)
}

/// Returns activation(gate) · up. SiLU, the most frequent gate, has its own backward.
pub(crate) fn gated(form: Activation, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    match form {
        Activation::Silu => swiglu(gate, up),
        _ => Ok((activation(&widen(gate)?, form)? * widen(up)?)?.to_dtype(gate.dtype())?),
    }
}

fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let inputs = [gate, up];
    let [gate, up] = inputs.map(Tensor::detach);
    let y = (widen(&gate)?.silu()? * widen(&up)?)?;
    with_backward(&inputs, &y.to_dtype(gate.dtype())?, move |y, grad| {
        let (gate, up, grad) = (widen(&gate)?, widen(&up)?, widen(&grad)?);
        let sigmoid = candle_nn::ops::sigmoid(&gate)?;
        let silu = (gate * &sigmoid)?;
        let slope = (&sigmoid + (&silu * (1.0 - &sigmoid)?)?)?;
        let grads = [(slope * up)? * &grad, silu * grad];
        grads.into_iter().map(|grad| grad?.to_dtype(y.dtype()).map(Some)).collect()
    })
}

pub(crate) fn softmax(x: &Tensor) -> Result<Tensor> {
    let y = softmax_last_dim(&widen(&x.detach().contiguous()?)?)?;
    with_backward(&[x], &y.to_dtype(x.dtype())?, move |_, grad| {
        let product = (widen(&grad)? * &y)?;
        let sums = product.sum_keepdim(D::Minus1)?;
        Ok(vec![Some((product - y.broadcast_mul(&sums)?)?.to_dtype(grad.dtype())?)])
    })
}

pub(crate) fn log_softmax(x: &Tensor) -> CandleResult<Tensor> {
    candle_nn::ops::log_softmax(&widen(x)?, D::Minus1)?.to_dtype(x.dtype())
}

/// One of candle's rotations, `rope`, `rope_i` or `rope_thd`, or [`rope_i_thd`], of a tensor by `cos`
/// and `sin`.
pub(crate) type Rotate = fn(&Tensor, &Tensor, &Tensor) -> CandleResult<Tensor>;

/// Rotates neighbors in [batch, length, heads, size].
pub(crate) fn rope_i_thd(x: &Tensor, cos: &Tensor, sin: &Tensor) -> CandleResult<Tensor> {
    candle_nn::rotary_emb::rope_i(&swap_heads(x)?, cos, sin).and_then(|y| swap_heads(&y))
}

/// `cos` and `sin` [length, at most size / 2].
pub(crate) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, rotate: Rotate) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return Ok(x.clone());
    }
    let [cos, sin] = [cos, sin].map(|angles| widen(&angles.contiguous()?));
    let (cos, sin) = (cos?, sin?);
    let turn = move |x: &Tensor, sin: &Tensor| {
        let (size, turned) = (x.dim(D::Minus1)?, 2 * sin.dim(1)?);
        let part = |start, len| widen(&x.narrow(D::Minus1, start, len)?.contiguous()?);
        let y = rotate(&part(0, turned)?, &cos, sin)?;
        let y = if turned < size {
            Tensor::cat(&[y, part(turned, size - turned)?], D::Minus1)?.contiguous()?
        } else {
            y
        };
        y.to_dtype(x.dtype())
    };
    let y = turn(&x.detach(), &sin)?;
    // The opposite rotation is the transposed one.
    let opposite = sin.neg()?;
    with_backward(&[x], &y, move |_, grad| Ok(vec![Some(turn(&grad, &opposite)?)]))
}

/// Cuts `x` [batch, length, heads · size] into heads, and rotates them. `cos` and `sin` [length, at
/// most size / 2].
pub(crate) fn split_and_rotate(
    x: &Tensor,
    heads: usize,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<Tensor> {
    let (batch, length, _) = x.dims3()?;
    let x = x.reshape((batch, length, heads, ()))?;
    rope(&x, cos, sin, candle_nn::rotary_emb::rope_thd)
}

pub(crate) fn embedding(table: &Tensor, indices: &Tensor) -> Result<Tensor> {
    let shape = [indices.dims(), &table.dims()[1..]].concat();
    let indices = indices.flatten_all()?;
    let y = table.detach().contiguous()?.index_select(&indices, 0)?.reshape(shape)?;
    let table_shape = table.shape().clone();
    with_backward(&[table], &y, move |_, grad| {
        let width: usize = table_shape.dims()[1..].iter().product();
        let rows = widen(&grad)?.reshape((indices.elem_count(), width))?;
        let grad_table = add_rows(&rows, &indices, table_shape.dims()[0])?;
        Ok(vec![Some(grad_table.reshape(&table_shape)?.to_dtype(grad.dtype())?)])
    })
}

/// Returns a table of `n` rows: row i is the sum of the rows of `x` whose index is i.
///
/// candle adds the rows of a tensor in order, with a thread per column. To use more threads, the rows
/// are split into parts that are added at once, each into its own table. The number of parts is chosen
/// so that all tables together have about four times as many rows as `x`.
fn add_rows(x: &Tensor, indices: &Tensor, n: usize) -> CandleResult<Tensor> {
    let (rows, width) = x.dims2()?;
    let n_parts = (4 * rows / n.max(1)).clamp(1, rows.max(1));
    if n_parts == 1 {
        return Tensor::zeros((n, width), x.dtype(), x.device())?.index_add(indices, x, 0);
    }
    let (rows_per_part, rest) = (rows / n_parts, rows % n_parts);
    let index = indices.narrow(0, 0, rows - rest)?.reshape((n_parts, rows_per_part, 1))?;
    let index = index.broadcast_as((n_parts, rows_per_part, width))?.contiguous()?;
    let rows_of_parts = x.narrow(0, 0, rows - rest)?.reshape((n_parts, rows_per_part, width))?;
    let tables = Tensor::zeros((n_parts, n, width), x.dtype(), x.device())?;
    let table = tables.scatter_add(&index, &rows_of_parts, 1)?.sum(0)?;
    if rest == 0 {
        return Ok(table);
    }
    table.index_add(&indices.narrow(0, rows - rest, rest)?, &x.narrow(0, rows - rest, rest)?, 0)
}

pub(crate) fn dropout(x: &Tensor, drop: DropSpec) -> CandleResult<Tensor> {
    // The kernel chooses the elements, so that all devices drop the same elements.
    let scales = dropout::apply(&vec![1_f32; x.elem_count()], drop);
    let kept = Tensor::from_vec(scales, x.shape(), &Device::Cpu)?.ne(0_f32)?;
    (x * kept.to_device(x.device())?.to_dtype(x.dtype())?)? * drop.scale
}

pub(crate) fn attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let inputs: Vec<_> = [query, key, value].into_iter().chain(&config.sinks).collect();
    let (_, _, heads, size) = query.dims4()?;
    let (scale, key_heads) = (config.scale(size), key.dim(2)?);
    let queries = swap_heads(&query.detach())?;
    let keys = swap_heads(&repeat_heads(&key.detach(), heads)?)?;
    let values = swap_heads(&repeat_heads(&value.detach(), heads)?)?;
    let scores = (widen(&queries.matmul(&keys.t()?)?)? * scale)?;
    let (mut scores, cap_slope) = cap(scores, config.softcap)?;
    if let Some(mask) = added_mask(config, &scores)? {
        scores = scores.broadcast_add(&mask)?;
    }
    // The attention weights.
    let (shares, sink_shares) = softmax_with_sinks(&scores, config.sinks.as_ref())?;
    let shares = shares.to_dtype(query.dtype())?;
    let y = swap_heads(&shares.matmul(&values)?)?;
    with_backward(&inputs, &y, move |_, grad| {
        let grad = swap_heads(&grad)?;
        let grad_values = shares.t()?.matmul(&grad)?;
        let grad_shares = widen(&grad.matmul(&values.t()?)?)?;
        // The backward pass of softmax: share · (gradient − Σ share · gradient). The sum is computed
        // from these rounded shares and gradients; y · grad would be the same only in exact arithmetic.
        let wide_shares = widen(&shares)?;
        let means = (&wide_shares * &grad_shares)?.sum_keepdim(D::Minus1)?;
        let grad_scores = (wide_shares * grad_shares.broadcast_sub(&means)?)?;
        let grad_scores = times(grad_scores, cap_slope.as_ref())?.to_dtype(shares.dtype())?;
        let grad_queries = (grad_scores.matmul(&keys)? * scale)?;
        let grad_keys = (grad_scores.t()?.matmul(&queries)? * scale)?;
        let mut grads = vec![
            Some(swap_heads(&grad_queries)?),
            Some(sum_heads(&swap_heads(&grad_keys)?, key_heads)?),
            Some(sum_heads(&swap_heads(&grad_values)?, key_heads)?),
        ];
        if let Some((shares, dtype)) = &sink_shares {
            // The dropped weight has no gradient of its own.
            let grad = (shares * means)?.sum((0, 2, 3))?.neg()?;
            grads.push(Some(grad.to_dtype(*dtype)?));
        }
        Ok(grads)
    })
}

/// Returns cap·tanh(x / cap) and its slopes, or `x` without a cap.
fn cap(x: Tensor, cap: Option<f64>) -> CandleResult<(Tensor, Option<Tensor>)> {
    let Some(cap) = cap else { return Ok((x, None)) };
    let shares = (x / cap)?.tanh()?;
    Ok(((&shares * cap)?, Some((1.0 - shares.sqr()?)?)))
}

/// Multiplies a gradient by slopes, if there are any.
fn times(grad: Tensor, slopes: Option<&Tensor>) -> CandleResult<Tensor> {
    slopes.map_or(Ok(grad.clone()), |slopes| grad * slopes)
}

/// Returns the weights of `scores` and, if there are sinks, their weights [batch, heads, queries, 1]
/// with the type of their gradient.
fn softmax_with_sinks(
    scores: &Tensor,
    sinks: Option<&Tensor>,
) -> CandleResult<(Tensor, Option<(Tensor, DType)>)> {
    let Some(sinks) = sinks else { return Ok((softmax_last_dim(scores)?, None)) };
    let (batch, heads, queries, keys) = scores.dims4()?;
    let logits = sinks.detach().to_dtype(scores.dtype())?.reshape((1, heads, 1, 1))?;
    let logits = logits.broadcast_as((batch, heads, queries, 1))?;
    let all = softmax_last_dim(&Tensor::cat(&[scores, &logits], D::Minus1)?.contiguous()?)?;
    let part = |start, len| all.narrow(D::Minus1, start, len)?.contiguous();
    Ok((part(0, keys)?, Some((part(keys, 1)?, sinks.dtype()))))
}

/// Exchanges positions and heads of [batch, positions, heads, size], or back.
fn swap_heads(x: &Tensor) -> CandleResult<Tensor> {
    x.transpose(1, 2)?.contiguous()
}

/// Returns the numbers that are added to `scores` [batch, heads, queries, keys], if anything.
fn added_mask(config: &AttentionConfig, scores: &Tensor) -> CandleResult<Option<Tensor>> {
    let mask = config.mask.as_ref().map(|mask| mask.to_dtype(scores.dtype())).transpose()?;
    if !config.causal && config.key_lengths.is_none() {
        return Ok(mask);
    }
    let (batch, _, queries, keys) = scores.dims4()?;
    let hidden = hidden_keys(config, [batch, queries, keys], scores.device())?;
    let hidden = hidden.to_dtype(scores.dtype())?;
    Ok(Some(match mask {
        Some(mask) => mask.broadcast_add(&hidden)?,
        None => hidden,
    }))
}

/// Returns −∞ for the keys hidden from a query, and 0 for the others; [batch or 1, 1, queries,
/// keys].
///
/// It is computed on the device from the range of visible keys per query: copying it would take
/// longer, since it has as many items as the scores of a head.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a tensor of scores for 2^32 keys fits on no device"
)]
pub(crate) fn hidden_keys(
    config: &AttentionConfig,
    [batch, queries, keys]: [usize; 3],
    device: &Device,
) -> CandleResult<Tensor> {
    let lengths = match &config.key_lengths {
        Some(lengths) => lengths[..batch].to_vec(),
        None => vec![keys],
    };
    let keys_of_first_query = config.causal.then(|| keys - queries + 1);
    let visible_keys =
        |&keys: &usize| VisibleKeys { keys, keys_of_first_query, window: config.window };
    let ranges = || {
        lengths.iter().map(visible_keys).flat_map(|keys| (0..queries).map(move |q| keys.range(q)))
    };
    let column =
        |bounds: Vec<u32>| Tensor::from_vec(bounds, (lengths.len(), 1, queries, 1), device);
    let all =
        Tensor::arange(0, keys as u32, device)?.broadcast_as((lengths.len(), 1, queries, keys))?;
    let ends = column(ranges().map(|range| range.end as u32).collect())?;
    let mut is_hidden = all.broadcast_ge(&ends)?;
    if config.window.is_some() {
        let starts = column(ranges().map(|range| range.start as u32).collect())?;
        // No key is before the first and after the last visible key.
        is_hidden = (is_hidden + all.broadcast_lt(&starts)?)?;
    }
    let fill = |value: f32| Tensor::new(value, device)?.broadcast_as(is_hidden.shape());
    is_hidden.where_cond(&fill(f32::NEG_INFINITY)?, &fill(0.0)?)
}

/// Repeats each head of [batch, length, key heads, size] up to `heads` heads.
pub(crate) fn repeat_heads(x: &Tensor, heads: usize) -> CandleResult<Tensor> {
    let (batch, length, key_heads, size) = x.dims4()?;
    let times = heads / key_heads;
    if times == 1 {
        return Ok(x.clone());
    }
    let repeated = x.unsqueeze(3)?.broadcast_as((batch, length, key_heads, times, size))?;
    repeated.contiguous()?.reshape((batch, length, heads, size))
}

/// Adds up the gradients of repeated heads.
fn sum_heads(x: &Tensor, key_heads: usize) -> CandleResult<Tensor> {
    let (batch, length, heads, size) = x.dims4()?;
    if heads == key_heads {
        return Ok(x.clone());
    }
    x.reshape((batch, length, key_heads, heads / key_heads, size))?.sum(3)
}

pub(crate) fn attention_packed(
    qkv: &Tensor,
    heads: usize,
    key_heads: usize,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let [query, key, value] = unpack(qkv, heads, key_heads)?;
    Ok(attention(&query, &key, &value, config)?.flatten_from(2)?)
}

/// Returns queries, keys and values, each [batch, length, heads, size].
pub(crate) fn unpack(qkv: &Tensor, heads: usize, key_heads: usize) -> CandleResult<[Tensor; 3]> {
    let (batch, length, width) = qkv.dims3()?;
    let size = width / (heads + 2 * key_heads);
    let part = |start: usize, heads: usize| {
        let part = qkv.narrow(2, start * size, heads * size)?.contiguous()?;
        part.reshape((batch, length, heads, size))
    };
    Ok([part(0, heads)?, part(heads, key_heads)?, part(heads + key_heads, key_heads)?])
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "candle's indices are u32, and no device holds a tensor of more rows"
)]
pub(crate) fn cross_entropy(
    logits: &Tensor,
    targets: &[RowTarget],
    smoothing: f64,
    class_weights: Option<&[f64]>,
    softcap: Option<f64>,
) -> Result<Tensor> {
    let (device, dtype, rows) = (logits.device(), logits.dtype(), targets.len());
    let classes = logits.dim(D::Minus1)?;
    if targets.iter().all(|target| target.weight == 0.0) {
        // Zero, with a gradient of zeros, so that code that sums gradients finds one.
        return Ok(scalar_with_grad(logits, logits.zeros_like()?)?.to_dtype(dtype)?);
    }
    // loss = −Σ over rows of (t · log p[class] + s · Σ over c of w[c] · log p[c]), with
    // t: `target_weights`, s: `smoothing_weights`, w: class weights.
    let column = |number: &dyn Fn(&RowTarget) -> f64| {
        let numbers = targets.iter().map(number).collect();
        Tensor::from_vec(numbers, (rows, 1), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
    };
    let class_weight = |class: usize| class_weights.map_or(1.0, |weights| weights[class]);
    let target_weights =
        column(&|target| target.weight * (1.0 - smoothing) * class_weight(target.class))?;
    let smoothing_weights = column(&|target| target.weight * smoothing / classes as f64)?;
    let all_class_weights: Vec<f64> = (0..classes).map(class_weight).collect();
    let sum_of_class_weights = all_class_weights.iter().sum::<f64>();
    let class_weight_tensor =
        Tensor::new(all_class_weights, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
    let class_indices: Vec<_> = targets.iter().map(|target| target.class as u32).collect();
    let target_classes = Tensor::from_vec(class_indices, (rows, 1), device)?;

    let shape = logits.shape().clone();
    let x = logits.detach().reshape((rows, classes))?.contiguous()?;
    let x = clear_weightless(&x, &column(&|target| target.weight)?)?;
    let (x, cap_slope) = cap(x, softcap)?;
    let log_probabilities = log_softmax(&x)?;
    let mut sum = (log_probabilities.gather(&target_classes, 1)? * &target_weights)?.sum_all()?;
    if smoothing > 0.0 {
        let row_sums = log_probabilities.broadcast_mul(&class_weight_tensor)?.sum_keepdim(1)?;
        sum = (sum + (row_sums * &smoothing_weights)?.sum_all()?)?;
    }
    with_backward(&[logits], &sum.neg()?, move |_, grad| {
        let target_weights = target_weights.broadcast_mul(&grad)?;
        let smoothing_weights = smoothing_weights.broadcast_mul(&grad)?;
        let totals = (&target_weights + (&smoothing_weights * sum_of_class_weights)?)?;
        let mut grad = softmax_last_dim(&x)?.broadcast_mul(&totals)?;
        if smoothing > 0.0 {
            grad = (grad - smoothing_weights.broadcast_mul(&class_weight_tensor)?)?;
        }
        let grad = grad.scatter_add(&target_classes, &target_weights.neg()?, 1)?;
        Ok(vec![Some(times(grad, cap_slope.as_ref())?.reshape(&shape)?)])
    })
}

/// Returns rows of logits with zeros for those of weight 0, which may be NaN. `weights` [rows, 1].
fn clear_weightless(x: &Tensor, weights: &Tensor) -> CandleResult<Tensor> {
    weights.ne(0_f64)?.broadcast_as(x.shape())?.where_cond(x, &x.zeros_like()?)
}

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;

    /// Halves with squares that overflow in f16, and sums that stop growing in bf16.
    fn large(dtype: DType) -> Tensor {
        let x = Tensor::arange(0_f32, 1200., &Device::Cpu).unwrap().reshape((2, 600)).unwrap();
        x.affine(0.5, -100.).unwrap().to_dtype(dtype).unwrap()
    }

    fn max_difference(left: &Tensor, right: &Tensor) -> f32 {
        let wide = |x: &Tensor| x.to_dtype(DType::F32).unwrap();
        let max_difference = (wide(left) - wide(right)).unwrap().flatten_all().unwrap();
        // candle's `max` would pass over a NaN, which here is the largest.
        let max_difference = max_difference.to_vec1::<f32>().unwrap().into_iter().map(f32::abs);
        max_difference.max_by(f32::total_cmp).unwrap()
    }

    #[test]
    fn composed_halves_are_rounded_once() {
        for (dtype, digit) in [(DType::F16, 1e-3), (DType::BF16, 8e-3)] {
            let x = large(dtype);
            let weight = Tensor::ones(600, dtype, &Device::Cpu).unwrap();
            let bias = weight.neg().unwrap();
            let pairs = [
                (norm(Norm::Rms, &x, &weight, None, 1e-5), crate::rms_norm(&x, &weight, 1e-5)),
                (
                    norm(Norm::Layer, &x, &weight, Some(&bias), 1e-5),
                    crate::layer_norm(&x, &weight, Some(&bias), 1e-5),
                ),
                (softmax(&x), crate::softmax(&x, D::Minus1)),
            ];
            for (composed, fused) in pairs {
                let (composed, fused) = (composed.unwrap(), fused.unwrap());
                assert_eq!(composed.dtype(), dtype);
                // Of numbers of at most 4.
                assert!(max_difference(&composed, &fused) <= 4. * digit, "{dtype:?}");
            }
        }
    }

    #[test]
    fn rows_are_added_in_any_number_of_parts() {
        let indices: Vec<u32> = (0..60).map(|n| n * n % 7).collect();
        let indices = Tensor::new(indices, &Device::Cpu).unwrap();
        let x = Tensor::arange(0_f32, 120., &Device::Cpu).unwrap().reshape((60, 2)).unwrap();
        for (rows, n) in [(0, 7), (1, 7), (5, 7), (60, 7), (59, 300), (58, 90)] {
            let (x, indices) = (x.narrow(0, 0, rows).unwrap(), indices.narrow(0, 0, rows).unwrap());
            let zeros = Tensor::zeros((n, 2), DType::F32, &Device::Cpu).unwrap();
            let expected = zeros.index_add(&indices, &x, 0).unwrap();
            let found = add_rows(&x, &indices, n).unwrap();
            assert_eq!(found.to_vec2::<f32>().unwrap(), expected.to_vec2::<f32>().unwrap());
        }
    }

    #[test]
    fn weightless_logits_may_be_nan() {
        let logits = Var::new(&[[f32::NAN, 0.], [0., 0.]], &Device::Cpu).unwrap();
        let target = |weight| RowTarget { class: 0, weight };
        let loss = cross_entropy(&logits, &[target(0.), target(1.)], 0., None, Some(5.)).unwrap();
        assert!((loss.to_scalar::<f32>().unwrap() - 2_f32.ln()).abs() < 1e-6);
        let grads = loss.backward().unwrap();
        let grad = grads.get(&logits).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(grad, [[0., 0.], [-0.5, 0.5]]);
    }

    #[test]
    fn silu_gradient_is_finite_for_low_inputs() {
        let x = Var::new(&[-100_f32, 0., 100.], &Device::Cpu).unwrap();
        let y = activation(&x, Activation::Silu).unwrap();
        let grad = y.backward().unwrap().get(&x).unwrap().to_vec1::<f32>().unwrap();
        for (slope, expected) in grad.into_iter().zip([0_f32, 0.5, 1.]) {
            assert!((slope - expected).abs() <= 1e-6, "{slope} instead of {expected}");
        }
    }

    #[test]
    fn causal_query_sees_earlier_keys() {
        let config = AttentionConfig::causal().with_key_lengths(vec![4, 2]);
        let hidden = hidden_keys(&config, [2, 3, 4], &Device::Cpu).unwrap();
        assert_eq!(hidden.dims(), [2, 1, 3, 4]);
        let seen = hidden.ge(0_f32).unwrap().flatten(0, 2).unwrap().to_vec2::<u8>().unwrap();
        let rows =
            [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]];
        assert_eq!(seen, rows);
        let causal = hidden_keys(&AttentionConfig::causal(), [2, 3, 4], &Device::Cpu).unwrap();
        assert_eq!(causal.dims(), [1, 1, 3, 4]);
    }

    #[test]
    fn query_sees_the_keys_of_its_window() {
        let (queries, keys) = (5, 9);
        for (window, length) in [1, 2, 4, 9, 100].into_iter().flat_map(|w| [(w, 9), (w, 3)]) {
            let config =
                AttentionConfig::causal().with_window(window).with_key_lengths(vec![length]);
            let hidden = hidden_keys(&config, [1, queries, keys], &Device::Cpu).unwrap();
            let seen = hidden.ge(0_f32).unwrap().flatten(0, 2).unwrap().to_vec2::<u8>().unwrap();
            for (query, seen) in seen.into_iter().enumerate() {
                let position = keys - queries + query;
                let in_window = |key: usize| key <= position && position < key + window;
                let mut expected: Vec<_> = (0..keys).map(|k| in_window(k) && k < length).collect();
                // A query of the padding without a key sees the last one.
                expected[length - 1] |= !expected.contains(&true);
                assert_eq!(seen, expected.into_iter().map(u8::from).collect::<Vec<_>>());
            }
        }
    }
}
