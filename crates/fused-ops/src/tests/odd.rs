//! Empty inputs, NaN and infinities, and parts of a whole.

use candle_core::{DType, Device, Tensor, Var};

use super::support::{
    AttentionSizes, OpCase, attention_cases, numbers, rope_cases, row_cases, run_on, values,
};
use crate::{
    config::DropoutKey,
    kernels::{cross_entropy::RowTarget, dropout::DropSpec},
    ops::cross_entropy::CrossEntropyConfig,
};

/// Returns an empty variable, and a contiguous view of it that begins past its storage.
fn behind_storage(shape: &[usize], dtype: DType) -> (Var, Tensor) {
    let mut wide = [shape, &[1]].concat();
    let after_empty = 1 + shape.iter().position(|&size| size == 0).unwrap();
    let size = wide[after_empty];
    wide[after_empty] += 2;
    let var = Var::zeros(wide, dtype, &Device::Cpu).unwrap();
    let view = var.narrow(after_empty, 2, size).unwrap().squeeze(shape.len()).unwrap();
    assert!(view.is_contiguous() && view.layout().start_offset() > 0);
    (var, view)
}

/// Operations on no rows, no positions and no sequences.
fn cases_with_empty_inputs() -> Vec<OpCase> {
    let none = AttentionSizes { batch: 0, queries: 3, keys: 4, key_heads: 1, group: 1, size: 2 };
    let attending = attention_cases(AttentionSizes { batch: 2, queries: 0, ..none });
    let mut cases = row_cases(0, 5);
    cases.retain(|case| case.name != "embedding");
    cases.extend(rope_cases(0, 2, 3, 2).into_iter().chain(rope_cases(1, 2, 0, 2)));
    cases.extend(attention_cases(none));
    cases.extend(attending.into_iter().filter(|case| !case.name.contains("packed")));
    cases
}

#[test]
fn empty_inputs_give_zero_gradients() {
    for (dtype, is_behind) in [(DType::F64, false), (DType::F32, true), (DType::F64, true)] {
        for case in cases_with_empty_inputs() {
            let input = |x: &Tensor| {
                if x.elem_count() == 0 && is_behind {
                    return behind_storage(x.dims(), dtype);
                }
                let var = Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap();
                (var.clone(), var.as_tensor().clone())
            };
            let (vars, seen): (Vec<_>, Vec<_>) = case.inputs(1).iter().map(input).unzip();
            let outcome = run_on(&case.fused, &seen, &vars);
            assert!(outcome.y.rank() == 0 || outcome.y.elem_count() == 0, "{}", case.name);
            for (grad, var) in outcome.grads.iter().zip(&vars) {
                assert_eq!(grad.dims(), var.dims(), "{}", case.name);
                assert!(values(grad).iter().all(|&grad| grad == 0.0), "{}", case.name);
            }
        }
    }
}

/// NaN and the infinities by name, finite numbers to six digits after the point: tails of GELU are
/// exact to less in the composed form.
fn kinds(tensor: &Tensor) -> Vec<String> {
    values(tensor)
        .into_iter()
        .map(
            |x: f64| {
                if x.is_finite() { ((x * 1e6).round() + 0.0).to_string() } else { x.to_string() }
            },
        )
        .collect()
}

#[test]
fn nan_propagates_like_composed_form() {
    for odd in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for case in row_cases(3, 40).into_iter().chain(rope_cases(1, 1, 2, 3)) {
            // candle's ReLU makes 0 of NaN, ours keeps it, as PyTorch's.
            if case.name.contains("Relu") {
                continue;
            }
            let mut inputs = case.inputs(1);
            let mut elements = values(&inputs[0]);
            elements[2] = odd;
            inputs[0] = Tensor::from_vec(elements, inputs[0].shape(), &Device::Cpu).unwrap();
            let fused = (case.fused)(&inputs).unwrap();
            let composed = (case.composed)(&inputs).unwrap();
            // One is a limit where the other is undefined: 0 · ∞.
            let limit =
                odd.is_infinite() && (case.name.contains("elu") || case.name.contains("ilu"));
            if !limit {
                assert_eq!(kinds(&fused), kinds(&composed), "{} of {odd}", case.name);
            }
        }
    }
}

#[test]
fn empty_loss_is_zero_with_gradient() {
    let none = Tensor::full(1_i64, 3, &Device::Cpu).unwrap();
    let config = CrossEntropyConfig::default().with_ignore_index(1);
    let logits = Var::from_tensor(&numbers(&[3, 5], 1)).unwrap();
    let fused = crate::cross_entropy(&logits, &none, &config).unwrap();
    assert_eq!(fused.weight, 0.0);
    let ignored = vec![RowTarget { class: 0, weight: 0.0 }; 3];
    let composed = crate::composed::cross_entropy(&logits, &ignored, 0.0, None).unwrap();
    for sum in [fused.sum, composed] {
        assert_eq!(sum.to_scalar::<f64>().unwrap(), 0.0);
        let grads = sum.backward().unwrap();
        assert!(values(grads.get(&logits).unwrap()).iter().all(|&grad| grad == 0.0));
    }
}

#[test]
fn part_drops_like_the_whole() {
    let key = DropoutKey { seed: 5, call: 2, offset: 0 };
    // Several blocks of the kernel.
    let x = numbers(&[100_000], 1).to_dtype(DType::F32).unwrap();
    let whole = crate::dropout(&x, 0.3, key).unwrap();
    for (start, len) in [(0, 70_000), (1, 99_999), (63, 1), (64, 900), (65, 63), (33_333, 66_667)] {
        let part = Var::from_tensor(&x.narrow(0, start, len).unwrap()).unwrap();
        let expected = values(&whole.narrow(0, start, len).unwrap());
        let key = DropoutKey { offset: start as u64, ..key };
        let dropped = crate::dropout(&part, 0.3, key).unwrap();
        assert!(values(&dropped) == expected, "{start} {len}");
        let composed = crate::composed::dropout(&part, DropSpec::new(0.3, key)).unwrap();
        let kept = |values: Vec<f64>| values.iter().map(|&y| y != 0.0).collect::<Vec<_>>();
        assert_eq!(kept(values(&composed)), kept(expected.clone()));
        let grads = dropped.backward().unwrap();
        assert_eq!(kept(values(grads.get(&part).unwrap())), kept(expected));
    }
}
