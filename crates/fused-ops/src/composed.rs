//! The operations of this crate, composed of candle's differentiable operations.
//!
//! They run on devices without kernels of this crate, and its tests compare the kernels with them.
//! The arguments are the same as for the functions with the same names at the root of the crate.
//! Those functions check them.

use candle_core::{D, DType, Device, Result, Tensor};

use crate::{
    autograd::scalar_with_grad,
    config::{Activation, AttentionConfig},
    kernels::{
        cross_entropy::RowTarget,
        dropout::{self, DropSpec},
        rope::PairLayout,
    },
};

/// Applies `f`. Inputs in half precision are converted to f32 first, and the result is rounded back
/// once: in half precision, squares would overflow and sums would lose small terms.
fn compute_halves_in_f32<const N: usize>(
    inputs: [&Tensor; N],
    f: impl FnOnce([&Tensor; N]) -> Result<Tensor>,
) -> Result<Tensor> {
    let dtype = inputs[0].dtype();
    if !matches!(dtype, DType::F16 | DType::BF16) {
        return f(inputs);
    }
    let mut wide = inputs.map(Tensor::clone);
    for x in &mut wide {
        *x = x.to_dtype(DType::F32)?;
    }
    f(wide.each_ref())?.to_dtype(dtype)
}

pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    compute_halves_in_f32([x, weight], |[x, weight]| {
        rms_normalize(x, epsilon)?.broadcast_mul(weight)
    })
}

pub(crate) fn layer_norm(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    epsilon: f64,
) -> Result<Tensor> {
    let scaled = |[x, weight]: [&Tensor; 2]| {
        let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        rms_normalize(&centered, epsilon)?.broadcast_mul(weight)
    };
    match bias {
        None => compute_halves_in_f32([x, weight], scaled),
        Some(bias) => compute_halves_in_f32([x, weight, bias], |[x, weight, bias]| {
            scaled([x, weight])?.broadcast_add(bias)
        }),
    }
}

fn rms_normalize(x: &Tensor, epsilon: f64) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + epsilon)?.sqrt()?)
}

pub(crate) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    activation: Option<Activation>,
) -> Result<Tensor> {
    let y = x.broadcast_matmul(&weight.t()?)?;
    let y = bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))?;
    activation.map_or(Ok(y.clone()), |form| self::activation(&y, form))
}

/// Cuts `x` [batch, length, heads · size] into heads, and rotates them. `cos` and `sin` [length,
/// size / 2].
pub(crate) fn split_and_rotate(
    x: &Tensor,
    heads: usize,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<Tensor> {
    let (batch, length, _) = x.dims3()?;
    let x = x.reshape((batch, length, heads, ()))?;
    rope(&x.transpose(1, 2)?, cos, sin, PairLayout::Halves)?.transpose(1, 2)?.contiguous()
}

pub(crate) fn activation(x: &Tensor, activation: Activation) -> Result<Tensor> {
    compute_halves_in_f32([x], |[x]| match activation {
        Activation::Relu => x.relu(),
        // Not `gelu_erf`: a constant in its gradient has only six digits.
        Activation::Gelu => (x * 0.5)? * ((x * std::f64::consts::FRAC_1_SQRT_2)?.erf()? + 1.0)?,
        Activation::GeluTanh => {
            let inner = (x + (x.powf(3.0)? * 0.044_715)?)?;
            (x * 0.5)? * ((inner * 0.797_884_560_802_865_4)?.tanh()? + 1.0)?
        }
        // Not `x / (exp(-x) + 1)`: its gradient is NaN where exp(-x) overflows.
        Activation::Silu => x.silu(),
    })
}

pub(crate) fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    compute_halves_in_f32([gate, up], |[gate, up]| activation(gate, Activation::Silu)? * up)
}

pub(crate) fn softmax(x: &Tensor) -> Result<Tensor> {
    compute_halves_in_f32([x], |[x]| candle_nn::ops::softmax(x, D::Minus1))
}

pub(crate) fn log_softmax(x: &Tensor) -> Result<Tensor> {
    compute_halves_in_f32([x], |[x]| candle_nn::ops::log_softmax(x, D::Minus1))
}

/// `x` [batch, heads, length, size], `cos` and `sin` [length, size / 2].
pub(crate) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: PairLayout) -> Result<Tensor> {
    compute_halves_in_f32([x, cos, sin], |[x, cos, sin]| rotate_pairs(x, cos, sin, pairs))
}

fn rotate_pairs(x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: PairLayout) -> Result<Tensor> {
    let half = x.dim(D::Minus1)? / 2;
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

pub(crate) fn embedding(table: &Tensor, indices: &Tensor) -> Result<Tensor> {
    let shape = [indices.dims(), &table.dims()[1..]].concat();
    table.contiguous()?.index_select(&indices.flatten_all()?, 0)?.reshape(shape)
}

pub(crate) fn dropout(x: &Tensor, drop: DropSpec) -> Result<Tensor> {
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
    let (batch, queries, heads, size) = query.dims4()?;
    let keys = key.dim(1)?;
    let query = query.transpose(1, 2)?;
    let key = repeat_heads(key, heads)?.transpose(1, 2)?;
    let value = repeat_heads(value, heads)?.transpose(1, 2)?;
    let scores = query.contiguous()?.matmul(&key.t()?.contiguous()?)?;
    let mut scores = (scores * config.scale(size))?;
    if let Some(mask) = &config.mask {
        scores = scores.broadcast_add(&mask.to_dtype(scores.dtype())?)?;
    }
    if config.causal || config.key_lengths.is_some() {
        let hidden = hidden_keys(config, [batch, queries, keys], scores.device())?;
        scores = scores.broadcast_add(&hidden.to_dtype(scores.dtype())?)?;
    }
    softmax(&scores)?.matmul(&value.contiguous()?)?.transpose(1, 2)?.contiguous()
}

/// Returns −∞ for the keys hidden from a query, and 0 for the others; [batch or 1, 1, queries,
/// keys].
///
/// It is computed on the device from the number of visible keys per query: copying it would take
/// longer, since it has as many items as the scores of a head.
#[expect(clippy::cast_possible_truncation, reason = "no device holds as many scores as 2^32 keys")]
fn hidden_keys(
    config: &AttentionConfig,
    [batch, queries, keys]: [usize; 3],
    device: &Device,
) -> Result<Tensor> {
    let lengths = match &config.key_lengths {
        Some(lengths) => lengths[..batch].to_vec(),
        None => vec![keys],
    };
    let visible_per_query = |length: usize| {
        (0..queries).map(move |query| {
            if config.causal { length.min(keys - queries + query + 1) } else { length }
        })
    };
    let counts: Vec<u32> =
        lengths.iter().flat_map(|&length| visible_per_query(length)).map(|n| n as u32).collect();
    let visible_keys = Tensor::from_vec(counts, (lengths.len(), 1, queries, 1), device)?;
    let is_hidden = Tensor::arange(0, keys as u32, device)?
        .broadcast_as((lengths.len(), 1, queries, keys))?
        .broadcast_ge(&visible_keys)?;
    let fill = |value: f32| Tensor::new(value, device)?.broadcast_as(is_hidden.shape());
    is_hidden.where_cond(&fill(f32::NEG_INFINITY)?, &fill(0.0)?)
}

/// Repeats each head of [batch, length, key heads, size] up to `heads` heads.
fn repeat_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, length, key_heads, size) = x.dims4()?;
    let times = heads / key_heads;
    if times == 1 {
        return Ok(x.clone());
    }
    let repeated = x.unsqueeze(3)?.broadcast_as((batch, length, key_heads, times, size))?;
    repeated.contiguous()?.reshape((batch, length, heads, size))
}

pub(crate) fn attention_packed(
    qkv: &Tensor,
    heads: usize,
    key_heads: usize,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let (batch, length, width) = qkv.dims3()?;
    let size = width / (heads + 2 * key_heads);
    let part = |start: usize, heads: usize| {
        let part = qkv.narrow(2, start * size, heads * size)?.contiguous()?;
        part.reshape((batch, length, heads, size))
    };
    let query = part(0, heads)?;
    let key = part(heads, key_heads)?;
    let value = part(heads + key_heads, key_heads)?;
    attention(&query, &key, &value, config)?.flatten_from(2)
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
                (rms_norm(&x, &weight, 1e-5), crate::rms_norm(&x, &weight, 1e-5)),
                (
                    layer_norm(&x, &weight, Some(&bias), 1e-5),
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
}
