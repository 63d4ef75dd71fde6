//! Operations composed of candle's differentiable operations, whose gradients are candle's.

use candle_core::{D, Device, Result, Tensor};

use crate::{
    autograd::scalar_with_grad,
    composed::{activation, hidden_keys, log_softmax, repeat_heads, unpack},
    config::{Activation, AttentionConfig},
    kernels::{cross_entropy::RowTarget, rope::PairLayout},
};

pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    rms_normalize(x, epsilon)?.broadcast_mul(weight)
}

pub(super) fn layer_norm(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    epsilon: f64,
) -> Result<Tensor> {
    let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let scaled = rms_normalize(&centered, epsilon)?.broadcast_mul(weight)?;
    bias.map_or(Ok(scaled.clone()), |bias| scaled.broadcast_add(bias))
}

fn rms_normalize(x: &Tensor, epsilon: f64) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + epsilon)?.sqrt()?)
}

pub(super) fn gated(gate: &Tensor, up: &Tensor, form: Activation) -> Result<Tensor> {
    activation(gate, form)? * up
}

pub(super) fn softmax(x: &Tensor) -> Result<Tensor> {
    candle_nn::ops::softmax(x, D::Minus1)
}

/// Cuts `x` [batch, length, heads · size] into heads, and rotates them. `cos` and `sin` [length,
/// size / 2].
pub(super) fn split_and_rotate(
    x: &Tensor,
    heads: usize,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<Tensor> {
    let (batch, length, _) = x.dims3()?;
    let x = x.reshape((batch, length, heads, ()))?;
    rope(&x.transpose(1, 2)?, cos, sin, PairLayout::Halves)?.transpose(1, 2)?.contiguous()
}

/// `x` [batch, heads, length, size], `cos` and `sin` [length, at most size / 2].
pub(super) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: PairLayout) -> Result<Tensor> {
    let (size, half) = (x.dim(D::Minus1)?, cos.dim(1)?);
    if 2 * half < size {
        let turned = rope(&x.narrow(D::Minus1, 0, 2 * half)?, cos, sin, pairs)?;
        let rest = x.narrow(D::Minus1, 2 * half, size - 2 * half)?;
        return Tensor::cat(&[turned, rest.contiguous()?], D::Minus1);
    }
    match pairs {
        PairLayout::Halves => {
            let a = x.narrow(D::Minus1, 0, half)?;
            let b = x.narrow(D::Minus1, half, half)?;
            let (a, b) = rotate(&a, &b, cos, sin)?;
            Tensor::cat(&[a, b], D::Minus1)
        }
        PairLayout::Neighbors => {
            let paired = x.contiguous()?.reshape((x.dim(0)?, x.dim(1)?, x.dim(2)?, half, 2))?;
            let a = paired.narrow(D::Minus1, 0, 1)?.squeeze(D::Minus1)?;
            let b = paired.narrow(D::Minus1, 1, 1)?.squeeze(D::Minus1)?;
            let (a, b) = rotate(&a, &b, cos, sin)?;
            Tensor::stack(&[a, b], D::Minus1)?.flatten_from(D::Minus2)
        }
    }
}

fn rotate(a: &Tensor, b: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<(Tensor, Tensor)> {
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (b.broadcast_mul(cos)? + a.broadcast_mul(sin)?)?;
    Ok((first, second))
}

pub(super) fn embedding(table: &Tensor, indices: &Tensor) -> Result<Tensor> {
    let shape = [indices.dims(), &table.dims()[1..]].concat();
    table.contiguous()?.index_select(&indices.flatten_all()?, 0)?.reshape(shape)
}

pub(super) fn attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let (batch, queries, heads, size) = query.dims4()?;
    let keys = key.dim(1)?;
    let query = query.transpose(1, 2)?;
    let key = repeat_heads(key, heads)?.transpose(1, 2)?;
    let value = repeat_heads(value, heads)?.transpose(1, 2)?;
    let scores = query.contiguous()?.matmul(&key.t()?.contiguous()?)?;
    let mut scores = (scores * config.scale(size))?;
    if let Some(cap) = config.softcap {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    if let Some(mask) = &config.mask {
        scores = scores.broadcast_add(&mask.to_dtype(scores.dtype())?)?;
    }
    if config.causal || config.key_lengths.is_some() {
        let hidden = hidden_keys(config, [batch, queries, keys], scores.device())?;
        scores = scores.broadcast_add(&hidden.to_dtype(scores.dtype())?)?;
    }
    if let Some(sinks) = &config.sinks {
        let sinks = sinks.reshape((1, heads, 1, 1))?.broadcast_as((batch, heads, queries, 1))?;
        scores = Tensor::cat(&[scores, sinks.contiguous()?], D::Minus1)?;
    }
    let shares = softmax(&scores)?.narrow(D::Minus1, 0, keys)?.contiguous()?;
    shares.matmul(&value.contiguous()?)?.transpose(1, 2)?.contiguous()
}

pub(super) fn attention_packed(
    qkv: &Tensor,
    heads: usize,
    key_heads: usize,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let [query, key, value] = unpack(qkv, heads, key_heads)?;
    attention(&query, &key, &value, config)?.flatten_from(2)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "candle's indices are u32, and no device holds a tensor of more rows"
)]
pub(super) fn cross_entropy(
    logits: &Tensor,
    targets: &[RowTarget],
    smoothing: f64,
    class_weights: Option<&[f64]>,
) -> Result<Tensor> {
    let classes = logits.dim(D::Minus1)?;
    // Leave out rows of weight 0, whose logits may be NaN.
    let counting = targets.iter().enumerate().filter(|(_, target)| target.weight != 0.0);
    let (rows, targets): (Vec<_>, Vec<_>) =
        counting.map(|(row, target)| (row as u32, *target)).unzip();
    if rows.is_empty() {
        // Zero, with a gradient of zeros, so that code that sums gradients finds one.
        return scalar_with_grad(logits, logits.zeros_like()?)?.to_dtype(logits.dtype());
    }
    let column = |numbers: Vec<f64>| {
        Tensor::from_vec(numbers, (rows.len(), 1), &Device::Cpu)?
            .to_dtype(logits.dtype())?
            .to_device(logits.device())
    };
    let class_weight = |class: usize| class_weights.map_or(1.0, |weights| weights[class]);
    let target_weight =
        |target: &RowTarget| target.weight * (1.0 - smoothing) * class_weight(target.class);
    let target_weights = column(targets.iter().map(target_weight).collect())?;
    let smoothing_weight = |target: &RowTarget| target.weight * smoothing / classes as f64;
    let smoothing_weights = column(targets.iter().map(smoothing_weight).collect())?;
    let all_class_weights: Vec<f64> = (0..classes).map(class_weight).collect();
    let class_weight_row = Tensor::new(all_class_weights, &Device::Cpu)?
        .to_dtype(logits.dtype())?
        .to_device(logits.device())?;

    let index = Tensor::new(rows.as_slice(), logits.device())?;
    let logits = logits.reshape(((), classes))?.index_select(&index, 0)?;
    let log_probabilities = log_softmax(&logits)?;
    let class_indices: Vec<_> = targets.iter().map(|target| target.class as u32).collect();
    let target_classes = Tensor::from_vec(class_indices, (targets.len(), 1), logits.device())?;
    let target_term =
        (log_probabilities.gather(&target_classes, 1)? * target_weights)?.sum_all()?;
    if smoothing == 0.0 {
        return target_term.neg();
    }
    let row_sums = log_probabilities.broadcast_mul(&class_weight_row)?.sum_keepdim(1)?;
    let smoothing_term = (row_sums * smoothing_weights)?.sum_all()?;
    (target_term + smoothing_term)?.neg()
}
