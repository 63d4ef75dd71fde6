//! Empty inputs, NaN and infinities, and dropout of parts.

use candle_core::{DType, Device, Tensor, Var};

use super::support::{
    AttentionSizes, OpCase, attention_cases, numbers, rope_cases, row_cases, run_on, values,
};
use crate::{
    config::DropoutKey,
    kernels::{cross_entropy::RowTarget, dropout::DropSpec},
    ops::cross_entropy::CrossEntropyConfig,
};

/// Returns an empty variable, and a contiguous view of it that begins beyond its storage.
fn empty_view(shape: &[usize], dtype: DType) -> (Var, Tensor) {
    let mut wide = [shape, &[1]].concat();
    let after_empty = 1 + shape.iter().position(|&size| size == 0).unwrap();
    let size = wide[after_empty];
    wide[after_empty] += 2;
    let var = Var::zeros(wide, dtype, &Device::Cpu).unwrap();
    let view = var.narrow(after_empty, 2, size).unwrap().squeeze(shape.len()).unwrap();
    assert!(view.is_contiguous() && view.layout().start_offset() > 0);
    (var, view)
}

/// Returns operations on no rows, no positions and no sequences.
fn cases_with_empty_inputs() -> Vec<OpCase> {
    let no_sequences =
        AttentionSizes { batch: 0, queries: 3, keys: 4, key_heads: 1, group: 1, size: 2 };
    let no_queries = AttentionSizes { batch: 2, queries: 0, ..no_sequences };
    let mut cases = row_cases(0, 5);
    cases.retain(|case| case.name != "embedding");
    cases.extend(rope_cases(0, 2, 3, 2).into_iter().chain(rope_cases(1, 2, 0, 2)));
    cases.extend(attention_cases(no_sequences));
    // The packed case has as many queries as keys.
    let separate = attention_cases(no_queries).into_iter();
    cases.extend(separate.filter(|case| !case.name.contains("packed")));
    cases
}

#[test]
fn empty_inputs_give_zero_gradients() {
    for (dtype, is_view) in [(DType::F64, false), (DType::F32, true), (DType::F64, true)] {
        for case in cases_with_empty_inputs() {
            let mut vars = Vec::new();
            let mut tensors = Vec::new();
            for x in case.inputs(1) {
                let (var, tensor) = if x.elem_count() == 0 && is_view {
                    empty_view(x.dims(), dtype)
                } else {
                    let var = Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap();
                    (var.clone(), var.as_tensor().clone())
                };
                vars.push(var);
                tensors.push(tensor);
            }
            let outcome = run_on(&case.fused, &tensors, &vars);
            assert!(outcome.y.rank() == 0 || outcome.y.elem_count() == 0, "{}", case.name);
            for (grad, var) in outcome.grads.iter().zip(&vars) {
                assert_eq!(grad.dims(), var.dims(), "{}", case.name);
                assert!(values(grad).iter().all(|&grad| grad == 0.0), "{}", case.name);
            }
        }
    }
}

/// Formats NaN and the infinities by name, and finite numbers as rounded millionths: in the tails
/// of GELU, the composed form is not more precise.
fn texts(tensor: &Tensor) -> Vec<String> {
    let mut texts = Vec::new();
    for x in values(tensor) {
        // Adding 0 turns −0 into 0.
        let rounded = if x.is_finite() { (x * 1e6).round() + 0.0 } else { x };
        texts.push(rounded.to_string());
    }
    texts
}

#[test]
fn nan_propagates_like_composed_form() {
    for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for case in row_cases(3, 40).into_iter().chain(rope_cases(1, 1, 2, 3)) {
            // candle's ReLU turns NaN into 0; ours keeps it, like PyTorch's.
            if case.name.contains("Relu") {
                continue;
            }
            let mut inputs = case.inputs(1);
            let mut elements = values(&inputs[0]);
            elements[2] = special;
            inputs[0] = Tensor::from_vec(elements, inputs[0].shape(), &Device::Cpu).unwrap();
            let fused = (case.fused)(&inputs).unwrap();
            let composed = (case.composed)(&inputs).unwrap();
            // At infinities, one form of GELU and SiLU returns the limit, and the other computes
            // 0 · ∞.
            let has_limit =
                special.is_infinite() && (case.name.contains("elu") || case.name.contains("ilu"));
            if !has_limit {
                assert_eq!(texts(&fused), texts(&composed), "{} of {special}", case.name);
            }
        }
    }
}

#[test]
fn empty_loss_is_zero_with_gradient() {
    let ignored_targets = Tensor::full(1_i64, 3, &Device::Cpu).unwrap();
    let config = CrossEntropyConfig::default().with_ignore_index(1);
    let logits = Var::from_tensor(&numbers(&[3, 5], 1)).unwrap();
    let fused = crate::cross_entropy(&logits, &ignored_targets, &config).unwrap();
    assert_eq!(fused.weight, 0.0);
    let weightless = vec![RowTarget { class: 0, weight: 0.0 }; 3];
    let composed = crate::composed::cross_entropy(&logits, &weightless, 0.0, None, None).unwrap();
    for sum in [fused.sum, composed] {
        assert_eq!(sum.to_scalar::<f64>().unwrap(), 0.0);
        let grads = sum.backward().unwrap();
        assert!(values(grads.get(&logits).unwrap()).iter().all(|&grad| grad == 0.0));
    }
}

#[test]
fn part_drops_like_the_whole() {
    let key = DropoutKey { seed: 5, call: 2, offset: 0 };
    // The kernel splits this input into several blocks.
    let x = numbers(&[100_000], 1).to_dtype(DType::F32).unwrap();
    let whole = crate::dropout(&x, 0.3, key).unwrap();
    for (start, len) in [(0, 70_000), (1, 99_999), (63, 1), (64, 900), (65, 63), (33_333, 66_667)] {
        let part = Var::from_tensor(&x.narrow(0, start, len).unwrap()).unwrap();
        let expected = values(&whole.narrow(0, start, len).unwrap());
        let key = DropoutKey { offset: start as u64, ..key };
        let dropped = crate::dropout(&part, 0.3, key).unwrap();
        assert!(values(&dropped) == expected, "{start} {len}");
        let composed = crate::composed::dropout(&part, DropSpec::new(0.3, key)).unwrap();
        let is_kept = |values: Vec<f64>| values.iter().map(|&y| y != 0.0).collect::<Vec<_>>();
        assert_eq!(is_kept(values(&composed)), is_kept(expected.clone()));
        let grads = dropped.backward().unwrap();
        assert_eq!(is_kept(values(grads.get(&part).unwrap())), is_kept(expected));
    }
}
