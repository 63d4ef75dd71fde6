//! The operations as a table: each with inputs of some shape, its fused and its composed form.

use candle_core::{DType, Device, Tensor, Var};

use super::reference;
use crate::{
    affine::AffineLayer,
    composed,
    config::{Activation, AttentionConfig, DropoutKey},
    error::Result,
    kernels::{cross_entropy::RowTarget, dropout::DropSpec, rope::PairLayout},
    ops::{
        cross_entropy::CrossEntropyConfig, linear::grouped::ExpertWeights, linear_add_rms_norm,
        mlp, swiglu_mlp,
    },
};

/// A function of tensors, fused or composed.
type Form = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// An operation, ready to be applied to inputs of these shapes.
pub(super) struct OpCase {
    pub(super) name: String,
    pub(super) shapes: Vec<Vec<usize>>,
    pub(super) fused: Form,
    pub(super) composed: Form,
}

impl OpCase {
    fn new(
        name: impl Into<String>,
        shapes: &[&[usize]],
        fused: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
        composed: impl Fn(&[Tensor]) -> candle_core::Result<Tensor> + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            shapes: shapes.iter().map(|shape| shape.to_vec()).collect(),
            fused: Box::new(fused),
            composed: Box::new(move |inputs| Ok(composed(inputs)?)),
        }
    }

    /// Returns inputs from −2 to 2 in f64, in which the kernels are most precise.
    pub(super) fn inputs(&self, seed: u64) -> Vec<Tensor> {
        let shapes = self.shapes.iter().zip(seed * 100..);
        shapes.map(|(shape, seed)| numbers(shape, seed)).collect()
    }
}

/// Returns pseudorandom numbers from −2 to 2.
pub(super) fn numbers(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1_u64 << 24) as f64 * 4.0 - 2.0
    };
    let n = shape.iter().product();
    Tensor::from_vec((0..n).map(|_| next()).collect::<Vec<f64>>(), shape, &Device::Cpu).unwrap()
}

/// Returns smaller numbers, so that results of wide products stay small.
fn scaled(weight: &Tensor) -> candle_core::Result<Tensor> {
    weight * 0.0625
}

/// Returns pseudorandom indices below `limit`.
fn indices(shape: &[usize], limit: usize) -> Tensor {
    let n: usize = shape.iter().product();
    Tensor::from_vec(
        (0..n).map(|i: usize| ((i * 7 + i * i * 3) % limit) as u32).collect::<Vec<_>>(),
        shape,
        &Device::Cpu,
    )
    .unwrap()
}

pub(super) const ACTIVATIONS: [Activation; 4] =
    [Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu];

/// Returns every operation on `rows` rows of `width` numbers.
pub(super) fn row_cases(rows: usize, width: usize) -> Vec<OpCase> {
    let x = &[rows, width][..];
    let mut cases = vec![
        OpCase::new(
            "rms_norm",
            &[x, &[width]],
            |t| crate::rms_norm(&t[0], &t[1], 1e-5),
            |t| reference::rms_norm(&t[0], &t[1], 1e-5),
        ),
        OpCase::new(
            "layer_norm",
            &[x, &[width], &[width]],
            |t| crate::layer_norm(&t[0], &t[1], Some(&t[2]), 1e-5),
            |t| reference::layer_norm(&t[0], &t[1], Some(&t[2]), 1e-5),
        ),
        OpCase::new(
            "layer_norm without bias",
            &[x, &[width]],
            |t| crate::layer_norm(&t[0], &t[1], None, 1e-5),
            |t| reference::layer_norm(&t[0], &t[1], None, 1e-5),
        ),
        OpCase::new("softmax", &[x], |t| crate::softmax(&t[0], 1), |t| reference::softmax(&t[0])),
        OpCase::new(
            "softmax of columns",
            &[x],
            |t| crate::softmax(&t[0], 0),
            |t| candle_nn::ops::softmax(&t[0], 0),
        ),
        OpCase::new(
            "log_softmax",
            &[x],
            |t| crate::log_softmax(&t[0], 1),
            |t| composed::log_softmax(&t[0]),
        ),
        OpCase::new(
            "swiglu",
            &[x, x],
            |t| crate::swiglu(&t[0], &t[1]),
            |t| reference::gated(&t[0], &t[1], Activation::Silu),
        ),
        OpCase::new(
            "geglu",
            &[x, x],
            |t| crate::geglu(&t[0], &t[1]),
            |t| reference::gated(&t[0], &t[1], Activation::GeluTanh),
        ),
        dropout_case(x),
        embedding_case(rows, width),
    ];
    cases.extend(add_norm_cases(x, width));
    cases.extend(ACTIVATIONS.map(|form| activation_case(x, form)));
    cases.extend(linear_cases(rows, width));
    cases.extend(lora_cases(rows, width));
    cases.extend(mlp_cases(rows, width));
    cases.extend(swiglu_mlp_cases(rows, width));
    cases.extend(linear_add_rms_norm_cases(rows, width));
    cases.extend(grouped_linear_cases(rows, width));
    cases.extend(cross_entropy_cases(rows, width));
    cases.extend(linear_cross_entropy_cases(rows, width));
    cases
}

/// Returns sums with their norms. The cases use only the sum, only the norm, or both.
fn add_norm_cases(x: &[usize], width: usize) -> Vec<OpCase> {
    let cases = (0..3).map(|used| {
        OpCase::new(
            format!("add_rms_norm {used}"),
            &[x, x, &[width]],
            move |t| Ok(one_or_both(used, crate::add_rms_norm(&t[0], &t[1], &t[2], 1e-5)?)?),
            move |t| {
                let sum = (&t[0] + &t[1])?;
                one_or_both(used, (sum.clone(), reference::rms_norm(&sum, &t[2], 1e-5)?))
            },
        )
    });
    cases.collect()
}

fn activation_case(x: &[usize], form: Activation) -> OpCase {
    let fused = move |t: &[Tensor]| match form {
        // ReLU has no function; it is only an option of `linear`.
        Activation::Relu => {
            let one = Tensor::ones((1, 1), t[0].dtype(), t[0].device())?;
            let x = t[0].flatten_all()?.unsqueeze(1)?;
            Ok(crate::linear(&x, &one, None, Some(form))?.reshape(t[0].shape())?)
        }
        Activation::Gelu => crate::gelu(&t[0]),
        Activation::GeluTanh => crate::gelu_tanh(&t[0]),
        Activation::Silu => crate::silu(&t[0]),
    };
    OpCase::new(format!("{form:?}"), &[x], fused, move |t| composed::activation(&t[0], form))
}

fn dropout_case(x: &[usize]) -> OpCase {
    let key = DropoutKey { seed: 7, call: 3, offset: 77 };
    OpCase::new(
        "dropout",
        &[x],
        move |t| crate::dropout(&t[0], 0.3, key),
        move |t| composed::dropout(&t[0], DropSpec::new(0.3, key)),
    )
}

fn embedding_case(rows: usize, width: usize) -> OpCase {
    // Some rows of the table are read several times, and some never.
    let index = indices(&[2, rows], rows.max(1));
    let composed_index = index.clone();
    OpCase::new(
        "embedding",
        &[&[rows + 3, width]],
        move |t| crate::embedding(&t[0], &index.to_device(t[0].device())?),
        move |t| reference::embedding(&t[0], &composed_index),
    )
}

fn linear_cases(rows: usize, width: usize) -> Vec<OpCase> {
    let x = [rows, width];
    let weight = [5, width];
    let bias = [5];
    let mut cases = vec![OpCase::new(
        "linear without bias",
        &[&x, &weight],
        |t| crate::linear(&t[0], &t[1], None, None),
        |t| composed::linear(&t[0], &t[1], None, None),
    )];
    // Weights as small as a trained layer's keep activations near 0, where they are curved. The
    // factor is a power of two, so the products are exact.
    cases.extend([None].into_iter().chain(ACTIVATIONS.map(Some)).map(|form| {
        OpCase::new(
            format!("linear {form:?}"),
            &[&x, &weight, &bias],
            move |t| crate::linear(&t[0], &scaled(&t[1])?, Some(&t[2]), form),
            move |t| composed::linear(&t[0], &scaled(&t[1])?, Some(&t[2]), form),
        )
    }));
    cases
}

/// Returns layers with adapters, alone and in the operations that contain layers. Their weights are
/// frozen, so both forms have no gradient of them.
fn lora_cases(rows: usize, width: usize) -> Vec<OpCase> {
    let x = &[rows, width][..];
    let adapted: [&[usize]; 4] = [x, &[5, width], &[3, width], &[5, 3]];
    let rest: [&[usize]; 4] = [&[5, width], &[4, 5], &[2, 5], &[4, 2]];
    let two_layers = [adapted, rest].concat();
    let one_layer: [&[usize]; 6] = [x, adapted[1], adapted[2], adapted[3], &[5], &[rows, 5]];
    let layer = |t: &[Tensor]| AffineLayer::new(&t[1], None).with_adapter(&t[2], &t[3], 0.5);
    let lora = |t: &[Tensor]| crate::lora_linear(&t[0], &t[1], None, &t[2], &t[3], 0.5);
    let second = |t: &[Tensor]| AffineLayer::new(&t[5], None).with_adapter(&t[6], &t[7], 2.0);
    let apply_second = |middle: &Tensor, t: &[Tensor]| -> candle_core::Result<Tensor> {
        Ok(crate::lora_linear(middle, &t[5], None, &t[6], &t[7], 2.0)?)
    };
    vec![
        OpCase::new(
            "lora_linear",
            &one_layer[..5],
            |t| crate::lora_linear(&t[0], &t[1], Some(&t[4]), &t[2], &t[3], 0.5),
            |t| {
                let low = composed::linear(&t[0], &t[2], None, None)?;
                let adapted = (composed::linear(&low, &t[3], None, None)? * 0.5)?;
                composed::linear(&t[0], &t[1].detach(), Some(&t[4]), None)? + adapted
            },
        ),
        OpCase::new(
            "linear_add_rms_norm with an adapter",
            &one_layer,
            move |t| {
                let both = linear_add_rms_norm::apply(&t[0], &layer(t), &t[5], &t[4], 1e-5)?;
                Ok(one_or_both(2, both)?)
            },
            move |t| one_or_both(2, crate::add_rms_norm(&lora(t)?, &t[5], &t[4], 1e-5)?),
        ),
        OpCase::new(
            "swiglu_mlp with adapters",
            &two_layers,
            move |t| {
                let up = AffineLayer::new(&t[4], None);
                swiglu_mlp::apply(&t[0], [&layer(t), &up, &second(t)], Activation::Silu, None)
            },
            move |t| {
                let up = crate::linear(&t[0], &t[4], None, None)?;
                apply_second(&crate::swiglu(&lora(t)?, &up)?, t)
            },
        ),
        OpCase::new(
            "mlp with adapters",
            &two_layers,
            move |t| mlp::apply(&t[0], &layer(t), Activation::Silu, &second(t)),
            move |t| apply_second(&crate::silu(&lora(t)?)?, t),
        ),
    ]
}

/// Returns cases of the operation alone; its parts have separate cases.
fn swiglu_mlp_cases(rows: usize, width: usize) -> Vec<OpCase> {
    let parts = |t: &[Tensor]| -> Result<Tensor> {
        let gate = crate::linear(&t[0], &t[1], None, None)?;
        let up = crate::linear(&t[0], &t[2], None, None)?;
        crate::linear(&crate::swiglu(&gate, &up)?, &t[3], None, None)
    };
    let shapes = [&[rows, width][..], &[7, width], &[7, width], &[5, 7], &[rows, 5]];
    let biases: [&[usize]; 3] = [&[7], &[7], &[5]];
    vec![
        OpCase::new(
            "swiglu_mlp GeluTanh with biases",
            &[&shapes[..4], &biases].concat(),
            |t| {
                let layers = [1, 2, 3].map(|i| AffineLayer::new(&t[i], Some(&t[i + 3])));
                swiglu_mlp::apply(&t[0], layers.each_ref(), Activation::GeluTanh, None)
            },
            |t| {
                let gate = crate::linear(&t[0], &t[1], Some(&t[4]), None)?;
                let up = crate::linear(&t[0], &t[2], Some(&t[5]), None)?;
                Ok(crate::linear(&crate::geglu(&gate, &up)?, &t[3], Some(&t[6]), None)?)
            },
        ),
        OpCase::new(
            "swiglu_mlp",
            &shapes[..4],
            |t| crate::swiglu_mlp(&t[0], &t[1], &t[2], &t[3], None),
            move |t| Ok(parts(t)?),
        ),
        OpCase::new(
            "swiglu_mlp with a residual",
            &shapes,
            |t| crate::swiglu_mlp(&t[0], &t[1], &t[2], &t[3], Some(&t[4])),
            move |t| parts(t)? + &t[4],
        ),
    ]
}

/// Returns cases that use only the sum, only the norm, or both. The linear layer and the norm have
/// separate cases.
fn linear_add_rms_norm_cases(rows: usize, width: usize) -> Vec<OpCase> {
    (0..3)
        .map(|used| {
            OpCase::new(
                format!("linear_add_rms_norm {used}"),
                &[&[rows, width], &[8, width], &[rows, 8], &[8]],
                move |t| {
                    let both = crate::linear_add_rms_norm(&t[0], &t[1], &t[2], &t[3], 1e-5)?;
                    Ok(one_or_both(used, both)?)
                },
                move |t| {
                    let product = crate::linear(&t[0], &t[1], None, None)?;
                    let both = crate::add_rms_norm(&product, &t[2], &t[3], 1e-5)?;
                    one_or_both(used, both)
                },
            )
        })
        .collect()
}

/// Returns the products of three experts, of which the second has no rows, with separate and stacked
/// weights.
fn grouped_linear_cases(rows: usize, width: usize) -> Vec<OpCase> {
    let first = rows / 3;
    let counts = [first, 0, rows - first];
    let stack = |t: &[Tensor]| Tensor::stack(&t[1..], 0);
    let composed = move |t: &[Tensor]| {
        let parts = [(0, first, &t[1]), (first, rows - first, &t[3])];
        let parts = parts.map(|(start, n, weight)| t[0].narrow(0, start, n)?.matmul(&weight.t()?));
        let [a, b] = parts;
        Tensor::cat(&[a?, b?], 0)
    };
    let shapes: [&[usize]; 4] = [&[rows, width], &[5, width], &[5, width], &[5, width]];
    vec![
        OpCase::new(
            "grouped_linear of separate weights",
            &shapes,
            move |t| crate::grouped_linear(&t[0], ExpertWeights::Separate(&t[1..]), &counts),
            composed,
        ),
        OpCase::new(
            "grouped_linear of a stacked weight",
            &shapes,
            move |t| crate::grouped_linear(&t[0], ExpertWeights::Stacked(&stack(t)?), &counts),
            composed,
        ),
    ]
}

/// Returns one of two results, or both.
fn one_or_both(used: usize, (sum, norm): (Tensor, Tensor)) -> candle_core::Result<Tensor> {
    match used {
        0 => Ok(sum),
        1 => Ok(norm),
        _ => Tensor::cat(&[sum, norm], 0),
    }
}

/// Returns cases of the operation alone; linear layers have separate cases with the same rounding.
fn mlp_cases(rows: usize, width: usize) -> Vec<OpCase> {
    let x = [rows, width];
    let up = [7, width];
    let bias = [7];
    let down = [5, 7];
    let down_bias = [5];
    let mut cases = vec![OpCase::new(
        "mlp Relu without biases",
        &[&x, &up, &down],
        |t| crate::mlp(&t[0], &t[1], None, Activation::Relu, &t[2], None),
        |t| {
            let middle = crate::linear(&t[0], &t[1], None, Some(Activation::Relu))?;
            Ok(crate::linear(&middle, &t[2], None, None)?)
        },
    )];
    cases.extend(ACTIVATIONS.map(|form| {
        OpCase::new(
            format!("mlp {form:?}"),
            &[&x, &up, &bias, &down, &down_bias],
            move |t| crate::mlp(&t[0], &scaled(&t[1])?, Some(&t[2]), form, &t[3], Some(&t[4])),
            move |t| {
                let middle = crate::linear(&t[0], &scaled(&t[1])?, Some(&t[2]), Some(form))?;
                Ok(crate::linear(&middle, &t[3], Some(&t[4]), None)?)
            },
        )
    }));
    cases
}

fn cross_entropy_cases(rows: usize, classes: usize) -> Vec<OpCase> {
    let case = |(number, loss): (usize, LossCase)| {
        let fused = loss.clone();
        OpCase::new(
            format!("cross_entropy {number}"),
            &[&[rows, classes]],
            move |t| Ok(crate::cross_entropy(&t[0], &fused.targets, &fused.config)?.sum),
            move |t| loss.composed(&t[0]),
        )
    };
    loss_cases(rows, classes).into_iter().enumerate().map(case).collect()
}

/// Returns heads with their losses.
fn linear_cross_entropy_cases(rows: usize, width: usize) -> Vec<OpCase> {
    const CLASSES: usize = 11;
    // Logits stay small, since the errors of large ones grow in their exponentials. A power of 2 is
    // exact in all types.
    let scaled = move |weight: &Tensor| weight / (width as f64).sqrt().log2().ceil().exp2();
    let case = |(number, loss): (usize, LossCase)| {
        let fused = loss.clone();
        OpCase::new(
            format!("linear_cross_entropy {number}"),
            &[&[rows, width], &[CLASSES, width]],
            move |t| {
                let weight = scaled(&t[1])?;
                let LossCase { targets, config } = &fused;
                Ok(crate::linear_cross_entropy(&t[0], &weight, targets, config)?.sum)
            },
            move |t| loss.composed(&composed::linear(&t[0], &scaled(&t[1])?, None, None)?),
        )
    };
    loss_cases(rows, CLASSES).into_iter().enumerate().map(case).collect()
}

/// Targets of rows, with the settings of their loss.
#[derive(Clone)]
struct LossCase {
    targets: Tensor,
    config: CrossEntropyConfig,
}

impl LossCase {
    fn composed(&self, logits: &Tensor) -> candle_core::Result<Tensor> {
        let values = |tensor: &Option<Tensor>| tensor.as_ref().map(|t| t.to_vec1::<f64>().unwrap());
        let row_weights = values(&self.config.row_weights);
        let class_weights = values(&self.config.class_weights);
        let weighted: Vec<_> = (self.targets.to_vec1::<i64>()?.into_iter().enumerate())
            .map(|(row, class)| {
                let weight = row_weights.as_ref().map_or(1.0, |weights| weights[row]);
                RowTarget { class: class as usize, weight: if class == 1 { 0.0 } else { weight } }
            })
            .collect();
        let smoothing = self.config.label_smoothing;
        let logits = (logits * self.config.logit_scale.unwrap_or(1.0))?;
        let logits = &match self.config.softcap {
            Some(cap) => ((logits / cap)?.tanh()? * cap)?,
            None => logits,
        };
        reference::cross_entropy(logits, &weighted, smoothing, class_weights.as_deref())
    }
}

/// Returns losses of `rows` rows that ignore class 1.
fn loss_cases(rows: usize, classes: usize) -> Vec<LossCase> {
    let targets = indices(&[rows], classes.max(1)).to_dtype(DType::I64).unwrap();
    let weights = numbers(&[rows], 5).abs().unwrap();
    let class_weights = numbers(&[classes], 6).abs().unwrap();
    let base = CrossEntropyConfig::default().with_ignore_index(1);
    let configs = [
        base.clone(),
        base.clone().with_label_smoothing(0.2).with_row_weights(weights.clone()),
        base.clone().with_class_weights(class_weights.clone()),
        base.clone().with_logit_scale(0.5),
        base.with_label_smoothing(0.1)
            .with_class_weights(class_weights)
            .with_row_weights(weights)
            .with_logit_scale(2.0)
            .with_softcap(3.0),
    ];
    configs.map(|config| LossCase { targets: targets.clone(), config }).into()
}

/// Returns projections to rotated heads.
fn linear_rope_cases(batch: usize, heads: usize, length: usize, half: usize) -> Vec<OpCase> {
    let width = heads * 2 * half;
    let shapes = [&[batch, length, 7][..], &[width, 7], &[width]];
    let angles = move |t: &Tensor, pairs: usize| -> candle_core::Result<[Tensor; 2]> {
        let angles = numbers(&[length, pairs], 9);
        // Numbers that all types represent exactly.
        let like = |x: Tensor| x.to_dtype(DType::BF16)?.to_dtype(t.dtype())?.to_device(t.device());
        Ok([like(angles.cos()?)?, like(angles.sin()?)?])
    };
    let case = |name: &str, n_inputs: usize, pairs: usize| {
        OpCase::new(
            name,
            &shapes[..n_inputs],
            move |t| {
                let [cos, sin] = angles(&t[0], pairs)?;
                crate::linear_rope(&t[0], &t[1], t.get(2), 2 * half, &cos, &sin)
            },
            move |t| {
                let [cos, sin] = angles(&t[0], pairs)?;
                let y = composed::linear(&t[0], &t[1], t.get(2), None)?;
                reference::split_and_rotate(&y, heads, &cos, &sin)
            },
        )
    };
    vec![case("linear_rope without bias", 2, half), case("linear_rope", 3, half.div_ceil(2))]
}

/// The layout of pairs, whether heads come before positions, and the number of pairs.
type RopeForm = (PairLayout, bool, usize);

/// Returns rotations of [batch, heads, length, size] in both layouts and conventions, whole and partial.
pub(super) fn rope_cases(batch: usize, heads: usize, length: usize, half: usize) -> Vec<OpCase> {
    let heads_first_shape = [batch, heads, length, 2 * half];
    let length_first_shape = [batch, length, heads, 2 * half];
    // One more position than `t` has.
    let angles = numbers(&[length + 1, half], 9);
    let index = move |t: &Tensor, function: fn(&Tensor) -> candle_core::Result<Tensor>| {
        // Numbers that all types represent exactly.
        function(&angles)?.to_dtype(DType::BF16)?.to_dtype(t.dtype())?.to_device(t.device())
    };
    let apply = move |(layout, heads_first, pairs): RopeForm, t: &Tensor| -> Result<Tensor> {
        let cos = index(t, Tensor::cos)?.narrow(1, 0, pairs)?;
        let sin = index(t, Tensor::sin)?.narrow(1, 0, pairs)?;
        match (layout, heads_first) {
            (PairLayout::Halves, true) => crate::rope(t, &cos, &sin),
            (PairLayout::Halves, false) => crate::rope_thd(t, &cos, &sin),
            (PairLayout::Neighbors, true) => crate::rope_i(t, &cos, &sin),
            (PairLayout::Neighbors, false) => crate::rope_i_thd(t, &cos, &sin),
        }
    };
    let angles = numbers(&[length + 1, half], 9).narrow(0, 0, length).unwrap();
    let reference = move |(layout, heads_first, pairs): RopeForm, t: &Tensor| {
        let exact = |x: Tensor| x.narrow(1, 0, pairs)?.to_dtype(DType::BF16)?.to_dtype(t.dtype());
        let cos = exact(angles.cos()?)?;
        let sin = exact(angles.sin()?)?;
        if heads_first {
            return reference::rope(t, &cos, &sin, layout);
        }
        reference::rope(&t.transpose(1, 2)?, &cos, &sin, layout)?.transpose(1, 2)
    };
    let mut cases = linear_rope_cases(batch, heads, length, half);
    let some = half.div_ceil(2);
    let forms: [RopeForm; 5] = [
        (PairLayout::Halves, true, half),
        (PairLayout::Halves, false, half),
        (PairLayout::Neighbors, true, half),
        (PairLayout::Halves, false, some),
        (PairLayout::Neighbors, false, some),
    ];
    for form in forms {
        let apply = apply.clone();
        let reference = reference.clone();
        cases.push(OpCase::new(
            format!("rope {form:?}"),
            &[if form.1 { &heads_first_shape } else { &length_first_shape }],
            move |t| apply(form, &t[0]),
            move |t| reference(form, &t[0]),
        ));
    }
    cases
}

/// The sizes of attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionSizes {
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) key_heads: usize,
    pub(super) group: usize,
    pub(super) size: usize,
}

/// Returns attention of separate inputs, with and without options, and of packed inputs.
pub(super) fn attention_cases(sizes: AttentionSizes) -> Vec<OpCase> {
    let AttentionSizes { batch, keys, key_heads, group, size, .. } = sizes;
    let mut cases: Vec<_> = (attention_configs(sizes).into_iter().enumerate())
        .map(|(number, config)| {
            attention_case(format!("attention {number} {sizes:?}"), sizes, config)
        })
        .collect();
    let heads = key_heads * group;
    let width = (heads + 2 * key_heads) * size;
    // A row of two sequences.
    let segments = (0..keys * keys).map(|i| {
        if (i / keys < keys / 3) == (i % keys < keys / 3) { 0. } else { f64::NEG_INFINITY }
    });
    let segments = Tensor::from_vec(segments.collect(), (keys, keys), &Device::Cpu).unwrap();
    let window = AttentionConfig::causal().with_window(4).with_softcap(1.5).with_mask(segments);
    for (config, shapes) in [
        (window, &[&[batch, keys, width][..], &[heads]][..]),
        (AttentionConfig::causal(), &[&[batch, keys, width]]),
    ] {
        let composed_config = config.clone();
        cases.push(OpCase::new(
            format!("packed attention {sizes:?}"),
            shapes,
            move |t| {
                crate::attention_packed(&t[0], heads, key_heads, &like(&config, &t[0], t.get(1))?)
            },
            move |t| {
                let config = like(&composed_config, &t[0], t.get(1))?;
                reference::attention_packed(&t[0], heads, key_heads, &config)
            },
        ));
    }
    cases
}

/// Returns options for inputs of these sizes. Sinks are inputs, so these here have no meaning.
fn attention_configs(sizes: AttentionSizes) -> Vec<AttentionConfig> {
    let AttentionSizes { batch, queries, keys, key_heads, group, .. } = sizes;
    let heads = key_heads * group;
    let lengths = (0..batch).map(|sequence| 1 + (sequence * 5 + 1) % keys).collect();
    // Most queries see several keys: the gradient of a single key is only rounding errors.
    let padded = (0..batch).map(|sequence| keys.saturating_sub(sequence).max(1)).collect();
    let mask = numbers(&[batch, 1, queries, keys], 3);
    let sinks = numbers(&[heads], 1);
    let mut configs = vec![
        AttentionConfig::default(),
        AttentionConfig { scale: Some(0.3), ..AttentionConfig::default().with_mask(mask.clone()) },
        AttentionConfig::default().with_key_lengths(lengths),
        AttentionConfig::default().with_mask(numbers(&[heads, 1, 1], 4)),
    ];
    if queries <= keys {
        let causal = AttentionConfig::causal();
        configs.extend([
            causal.clone(),
            causal.clone().with_mask(mask.clone()),
            causal.clone().with_window(3).with_sinks(sinks.clone()).with_mask(mask.clone()),
            causal.with_window(70).with_softcap(2.0).with_key_lengths(padded),
        ]);
    }
    configs.push(AttentionConfig::default().with_softcap(0.7).with_mask(mask).with_sinks(sinks));
    configs
}

/// Returns `config` with a mask on the device of `x`, and with these sinks.
fn like(
    config: &AttentionConfig,
    x: &Tensor,
    sinks: Option<&Tensor>,
) -> candle_core::Result<AttentionConfig> {
    let mask = config.mask.as_ref().map(|mask| mask.to_device(x.device())).transpose()?;
    Ok(AttentionConfig { mask, sinks: sinks.cloned(), ..config.clone() })
}

/// Returns attention of separate inputs.
pub(super) fn attention_case(
    name: String,
    sizes: AttentionSizes,
    config: AttentionConfig,
) -> OpCase {
    let AttentionSizes { batch, queries, keys, key_heads, group, size } = sizes;
    let heads = key_heads * group;
    let shapes: [&[usize]; 4] = [
        &[batch, queries, heads, size],
        &[batch, keys, key_heads, size],
        &[batch, keys, key_heads, size + 1],
        &[heads],
    ];
    let n_inputs = if config.sinks.is_some() { 4 } else { 3 };
    let composed_config = config.clone();
    OpCase::new(
        name,
        &shapes[..n_inputs],
        move |t| crate::attention(&t[0], &t[1], &t[2], &like(&config, &t[0], t.get(3))?),
        move |t| {
            reference::attention(&t[0], &t[1], &t[2], &like(&composed_config, &t[0], t.get(3))?)
        },
    )
}

/// Returns a small case of every operation.
pub(super) fn all_cases() -> Vec<OpCase> {
    let sizes = AttentionSizes { batch: 2, queries: 3, keys: 5, key_heads: 2, group: 2, size: 4 };
    let mut cases = row_cases(4, 7);
    cases.extend(rope_cases(2, 3, 4, 3));
    cases.extend(attention_cases(sizes));
    cases
}

/// A result and the gradients of its inputs.
pub(super) struct OpOutcome {
    pub(super) y: Tensor,
    pub(super) grads: Vec<Tensor>,
}

/// Runs a form on variables, with a gradient of the result that differs from element to element.
pub(super) fn run(form: &Form, inputs: &[Tensor]) -> OpOutcome {
    let vars: Vec<_> = inputs.iter().map(|input| Var::from_tensor(input).unwrap()).collect();
    let tensors: Vec<_> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    run_on(form, &tensors, &vars)
}

/// Runs like [`run`], on tensors that were computed from variables.
pub(super) fn run_on(form: &Form, tensors: &[Tensor], vars: &[Var]) -> OpOutcome {
    let y = form(tensors).unwrap();
    let seed = numbers(y.dims(), 77).to_dtype(y.dtype()).unwrap().to_device(y.device()).unwrap();
    let store = (&y * seed).unwrap().sum_all().unwrap().backward().unwrap();
    let grads = vars.iter().map(|var| match store.get(var) {
        Some(grad) => grad.clone(),
        None => var.zeros_like().unwrap(),
    });
    let grads = grads.collect();
    OpOutcome { y, grads }
}

/// Returns the elements of a tensor as f64.
pub(super) fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the largest difference, divided by the largest element of the reference. A NaN anywhere
/// makes the result NaN.
pub(super) fn relative_error(found: &Tensor, reference: &Tensor) -> f64 {
    assert_eq!(found.dims(), reference.dims());
    let found = values(found);
    let reference = values(reference);
    let difference = largest(found.iter().zip(&reference).map(|(a, b)| a - b));
    let largest = largest(reference.iter().copied());
    // If the reference is only rounding errors, the difference is not relative to it.
    if largest < 1e-9 { difference } else { difference / largest }
}

/// Returns the largest magnitude. NaN counts as the largest; `f64::max` would ignore it.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.map(f64::abs).max_by(f64::total_cmp).unwrap_or(0.0)
}
