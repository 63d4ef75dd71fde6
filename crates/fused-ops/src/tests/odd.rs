//! What is empty, what is no number, and what is refused.

use candle_core::{DType, Device, Tensor, Var};

use super::support::{Attending, attention_cases, numbers, rope_cases, row_cases, run, values};
use crate::{
    config::{Activation, AttentionConfig, DropoutKey},
    cross_entropy::CrossEntropyConfig,
    error::Error,
    kernels::{cross_entropy::Target, dropout::Drop},
};

#[test]
fn no_rows_give_no_rows_and_gradients_of_zero() {
    let embedding = |case: &super::support::Case| case.name == "embedding";
    for case in row_cases(0, 5).into_iter().filter(|case| !embedding(case)) {
        let inputs = case.inputs(1);
        let outcome = run(&case.fused, &inputs);
        for (grad, input) in outcome.grads.iter().zip(&inputs) {
            assert_eq!(grad.dims(), input.dims(), "{}", case.name);
            assert!(values(grad).iter().all(|&grad| grad == 0.0), "{}", case.name);
        }
    }
    for case in rope_cases(0, 2, 3, 2).into_iter().chain(rope_cases(1, 2, 0, 2)) {
        assert_eq!(run(&case.fused, &case.inputs(1)).y.elem_count(), 0);
    }
    let none = Attending { batch: 0, queries: 3, keys: 4, key_heads: 1, group: 1, size: 2 };
    for sizes in [none, Attending { batch: 2, queries: 0, ..none }] {
        for case in attention_cases(sizes) {
            if sizes.queries == 0 && case.name.contains("packed") {
                continue;
            }
            let outcome = run(&case.fused, &case.inputs(1));
            assert_eq!(outcome.y.elem_count(), 0, "{}", case.name);
            assert!(outcome.grads.iter().flat_map(values).all(|grad| grad == 0.0));
        }
    }
}

#[test]
fn rows_without_elements_stay_so() {
    let x = numbers(&[3, 0], 1);
    let weight = numbers(&[0], 1);
    assert_eq!(crate::rms_norm(&x, &weight, 1e-5).unwrap().dims(), [3, 0]);
    assert_eq!(crate::layer_norm(&x, &weight, Some(&weight), 1e-5).unwrap().dims(), [3, 0]);
    assert_eq!(crate::softmax(&x, 1).unwrap().dims(), [3, 0]);
    assert_eq!(crate::gelu(&x).unwrap().dims(), [3, 0]);
    let y = crate::linear(&x, &numbers(&[2, 0], 1), Some(&numbers(&[2], 1)), None).unwrap();
    let bias = values(&numbers(&[2], 1));
    assert_eq!(values(&y), [bias.clone(), bias.clone(), bias].concat());
}

/// NaN and the infinities by name, finite numbers to six digits after the point: tails of GELU are
/// exact to less in the composed form.
fn kinds(tensor: &Tensor) -> Vec<String> {
    let kind =
        |x: f64| if x.is_finite() { ((x * 1e6).round() + 0.0).to_string() } else { x.to_string() };
    values(tensor).into_iter().map(kind).collect()
}

#[test]
fn what_is_no_number_comes_out_as_of_the_composed_form() {
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
fn activations_of_infinity() {
    let x = Tensor::new(&[f32::INFINITY, f32::NAN], &Device::Cpu).unwrap();
    for form in [crate::gelu, crate::gelu_tanh, crate::silu] {
        let y = form(&x).unwrap().to_vec1::<f32>().unwrap();
        assert!(y[0] == f32::INFINITY && y[1].is_nan());
    }
}

#[test]
fn attention_without_a_score_is_nan_and_a_hidden_nan_is_not_seen() {
    let x = numbers(&[1, 2, 1, 4], 1);
    let mask = Tensor::new(&[[f64::NEG_INFINITY; 2], [0.0; 2]], &Device::Cpu).unwrap();
    let y = crate::attention(&x, &x, &x, &AttentionConfig::default().with_mask(mask)).unwrap();
    let y = values(&y);
    assert!(y[..4].iter().all(|y| y.is_nan()) && y[4..].iter().all(|y| y.is_finite()));

    // Scores that are all −∞ in the first block of keys, but not in the second.
    let query = numbers(&[1, 1, 1, 4], 2);
    let key = numbers(&[1, 300, 1, 4], 3);
    let mask = (0..300).map(|key| if key < 290 { f64::NEG_INFINITY } else { 0.0 });
    let mask = Tensor::from_iter(mask, &Device::Cpu).unwrap();
    let config = AttentionConfig::default().with_mask(mask);
    let found = crate::attention(&query, &key, &key, &config).unwrap();
    let last = key.narrow(1, 290, 10).unwrap();
    let expected = crate::attention(&query, &last, &last, &AttentionConfig::default()).unwrap();
    assert!(super::support::error(&found, &expected) < 1e-14);
}

#[test]
fn a_row_of_weight_zero_may_have_any_logits() {
    let logits = Tensor::new(&[[1.0, 1.0], [f64::NAN, 0.0]], &Device::Cpu).unwrap();
    let logits = Var::from_tensor(&logits).unwrap();
    let targets = Tensor::new(&[0_u32, 0], &Device::Cpu).unwrap();
    let weights = Tensor::new(&[1.0, 0.0], &Device::Cpu).unwrap();
    let config = CrossEntropyConfig::default().with_row_weights(weights);
    let loss = crate::cross_entropy(&logits, &targets, &config).unwrap();
    assert!((loss.mean().unwrap().to_scalar::<f64>().unwrap() - 2.0_f64.ln()).abs() < 1e-15);
    let grads = loss.sum.backward().unwrap();
    let grad = values(grads.get(&logits).unwrap());
    assert!(grad.iter().zip([-0.5, 0.5, 0.0, 0.0]).all(|(a, b)| (a - b).abs() < 1e-15), "{grad:?}");
}

#[test]
fn a_loss_of_no_row_is_zero_and_has_a_gradient() {
    let none = Tensor::full(1_i64, 3, &Device::Cpu).unwrap();
    let config = CrossEntropyConfig::default().with_ignore_index(1);
    let logits = Var::from_tensor(&numbers(&[3, 5], 1)).unwrap();
    let fused = crate::cross_entropy(&logits, &none, &config).unwrap();
    assert_eq!(fused.weight, 0.0);
    let ignored = vec![Target { class: 0, weight: 0.0 }; 3];
    let composed = crate::composed::cross_entropy(&logits, &ignored, 0.0, None).unwrap();
    for sum in [fused.sum, composed] {
        assert_eq!(sum.to_scalar::<f64>().unwrap(), 0.0);
        let grads = sum.backward().unwrap();
        assert!(values(grads.get(&logits).unwrap()).iter().all(|&grad| grad == 0.0));
    }
}

#[test]
fn which_elements_are_dropped_never_changes() {
    let x = Tensor::ones(12, DType::F32, &Device::Cpu).unwrap();
    let dropped = |seed, call| {
        let y = crate::dropout(&x, 0.5, DropoutKey { seed, call, offset: 0 }).unwrap();
        y.to_vec1::<f32>()
            .unwrap()
            .iter()
            .map(|&y| if y == 0.0 { '0' } else { '1' })
            .collect::<String>()
    };
    assert_eq!(
        [dropped(0, 0), dropped(1, 0), dropped(0, 1)],
        ["010110110111", "110100001001", "111011001110"]
    );
}

#[test]
fn a_part_drops_what_the_whole_drops_there() {
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
        let composed = crate::composed::dropout(&part, Drop::new(0.3, key)).unwrap();
        let kept = |values: Vec<f64>| values.iter().map(|&y| y != 0.0).collect::<Vec<_>>();
        assert_eq!(kept(values(&composed)), kept(expected.clone()));
        let grads = dropped.backward().unwrap();
        assert_eq!(kept(values(grads.get(&part).unwrap())), kept(expected));
    }
}

#[test]
fn the_last_offset_is_one_too() {
    let x = Tensor::ones(1000, DType::F32, &Device::Cpu).unwrap();
    let key = DropoutKey { seed: 0, call: 0, offset: u64::MAX };
    let zeros = values(&crate::dropout(&x, 0.5, key).unwrap());
    assert!((400..600).contains(&zeros.iter().filter(|&&y| y == 0.0).count()));
}

#[test]
fn no_two_stretches_of_a_tensor_drop_alike() {
    let x = Tensor::ones(40_000, DType::F32, &Device::Cpu).unwrap();
    let key = DropoutKey { seed: 0, call: 0, offset: 0 };
    let y = values(&crate::dropout(&x, 0.5, key).unwrap());
    let first = &y[..64];
    assert!(y[64..].chunks_exact(64).all(|other| other != first));
}

#[test]
fn as_many_elements_are_dropped_as_asked_for() {
    let x = Tensor::ones(100_000, DType::F32, &Device::Cpu).unwrap();
    for probability in [0.0, 0.1, 0.5, 0.9] {
        let key = DropoutKey { seed: 3, call: 1, offset: 0 };
        let y = crate::dropout(&x, probability, key).unwrap();
        let zeros = values(&y).iter().filter(|&&y| y == 0.0).count() as f64;
        assert!((zeros / 1e5 - probability).abs() < 0.006, "{zeros} of {probability}");
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let x = numbers(&[2, 3], 1);
    let bad = numbers(&[4], 1);
    let is_shape = |error: Error| matches!(error, Error::Shape { .. });
    assert!(is_shape(crate::rms_norm(&x, &bad, 1e-5).unwrap_err()));
    assert!(is_shape(crate::rms_norm(&numbers(&[], 1), &bad, 1e-5).unwrap_err()));
    assert!(is_shape(crate::layer_norm(&x, &numbers(&[3], 1), Some(&bad), 1e-5).unwrap_err()));
    assert!(is_shape(crate::linear(&x, &numbers(&[3, 4], 1), None, None).unwrap_err()));
    assert!(is_shape(crate::linear(&x, &numbers(&[3, 3], 1), Some(&bad), None).unwrap_err()));
    let middle = |up: &[usize], down: &[usize], bias: Option<&Tensor>| {
        let up = numbers(up, 1);
        let down = numbers(down, 1);
        is_shape(crate::mlp(&x, &up, bias, Activation::Relu, &down, None).unwrap_err())
    };
    assert!(middle(&[5, 4], &[3, 5], None));
    assert!(middle(&[5, 3], &[3, 6], None));
    assert!(middle(&[5, 3], &[3, 5], Some(&bad)));
    assert!(is_shape(crate::swiglu(&x, &bad).unwrap_err()));
    let gated = |gate: &[usize], up: &[usize], down: &[usize]| {
        let [gate, up, down] = [gate, up, down].map(|shape| numbers(shape, 1));
        is_shape(crate::swiglu_mlp(&x, &gate, &up, &down, None).unwrap_err())
            && is_shape(crate::swiglu_mlp(&x, &gate, &up, &down, Some(&x)).unwrap_err())
    };
    assert!(gated(&[5, 4], &[5, 3], &[3, 5]));
    assert!(gated(&[5, 3], &[6, 3], &[3, 5]));
    assert!(gated(&[5, 3], &[5, 3], &[3, 6]));
    let [gate, down] = [[5, 3], [3, 5]].map(|shape| numbers(&shape, 1));
    assert!(is_shape(crate::swiglu_mlp(&x, &gate, &gate, &down, Some(&bad)).unwrap_err()));
    let joined = |weight: &[usize], residual: &[usize], norm: &[usize]| {
        let [weight, residual, norm] = [weight, residual, norm].map(|shape| numbers(shape, 1));
        let error = crate::linear_add_rms_norm(&x, &weight, &residual, &norm, 1e-5).unwrap_err();
        is_shape(error)
    };
    assert!(joined(&[5, 4], &[2, 5], &[5]));
    assert!(joined(&[5, 3], &[2, 3], &[5]));
    assert!(joined(&[5, 3], &[2, 5], &[3]));
    let projected = |x: &[usize], weight: &[usize], bias: Option<&Tensor>, cos: &[usize]| {
        let [x, weight, cos] = [x, weight, cos].map(|shape| numbers(shape, 1));
        is_shape(crate::linear_rope(&x, &weight, bias, &cos, &cos).unwrap_err())
    };
    assert!(projected(&[2, 3], &[4, 3], None, &[2, 1]));
    assert!(projected(&[1, 2, 3], &[4, 2], None, &[2, 1]));
    assert!(projected(&[1, 2, 3], &[6, 3], None, &[2, 2]));
    assert!(projected(&[1, 2, 3], &[6, 3], Some(&bad), &[2, 1]));
    assert!(projected(&[1, 2, 3], &[4, 3], None, &[1, 1]));
    assert!(projected(&[1, 2, 3], &[4, 3], None, &[2, 0]));
    assert!(projected(&[1, 2, 3], &[4, 3], None, &[2]));
    assert!(is_shape(crate::rope(&x, &x, &x).unwrap_err()));
    assert!(is_shape(crate::rope(&numbers(&[1, 1, 3, 4], 1), &x, &x).unwrap_err()));
    assert!(is_shape(crate::embedding(&bad, &bad).unwrap_err()));
    let packed = numbers(&[1, 2, 7], 1);
    let config = AttentionConfig::default();
    assert!(is_shape(crate::attention_packed(&packed, 1, 1, &config).unwrap_err()));
    let few = numbers(&[1, 2, 3, 4], 1);
    let many = numbers(&[1, 5, 3, 4], 1);
    let causal = AttentionConfig::causal();
    assert!(is_shape(crate::attention(&many, &few, &few, &causal).unwrap_err()));
    assert!(is_shape(crate::attention(&few, &many, &few, &config).unwrap_err()));
    let two_heads = numbers(&[1, 5, 2, 4], 1);
    assert!(is_shape(crate::attention(&few, &two_heads, &two_heads, &config).unwrap_err()));
    let masked = config.clone().with_mask(numbers(&[9, 9], 1));
    assert!(is_shape(crate::attention(&few, &many, &many, &masked).unwrap_err()));
    let lengths = config.with_key_lengths(vec![1, 1]);
    assert!(is_shape(crate::attention(&few, &many, &many, &lengths).unwrap_err()));
}

#[test]
fn types_that_do_not_fit_are_refused() {
    let x = numbers(&[2, 3], 1);
    let single = numbers(&[3], 1).to_dtype(DType::F32).unwrap();
    let is_dtype = |error: Error| matches!(error, Error::DType { .. });
    assert!(is_dtype(crate::rms_norm(&x, &single, 1e-5).unwrap_err()));
    assert!(is_dtype(crate::gelu(&x.to_dtype(DType::U32).unwrap()).unwrap_err()));
    assert!(is_dtype(crate::embedding(&x, &single).unwrap_err()));
    let config = CrossEntropyConfig::default();
    let targets = numbers(&[2], 1);
    assert!(is_dtype(crate::cross_entropy(&x, &targets, &config).unwrap_err()));
}

#[test]
fn settings_out_of_range_are_refused() {
    let x = numbers(&[2, 3], 1);
    let is_setting = |error: Error| matches!(error, Error::Setting { .. });
    let key = DropoutKey { seed: 0, call: 0, offset: 0 };
    for probability in [-0.1, 1.0, f64::NAN] {
        assert!(is_setting(crate::dropout(&x, probability, key).unwrap_err()));
    }
    let targets = Tensor::new(&[0_u32, 2], &Device::Cpu).unwrap();
    let smoothed = CrossEntropyConfig::default().with_label_smoothing(1.1);
    assert!(is_setting(crate::cross_entropy(&x, &targets, &smoothed).unwrap_err()));
    let ignoring = CrossEntropyConfig::default()
        .with_row_weights(Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap());
    assert!(is_setting(crate::cross_entropy(&x, &targets, &ignoring).unwrap().mean().unwrap_err()));
    let qkv = numbers(&[1, 2, 3, 4], 1);
    for length in [0, 3] {
        let config = AttentionConfig::default().with_key_lengths(vec![length]);
        assert!(is_setting(crate::attention(&qkv, &qkv, &qkv, &config).unwrap_err()));
    }
    let packed = numbers(&[1, 2, 9], 1);
    assert!(is_setting(
        crate::attention_packed(&packed, 3, 2, &AttentionConfig::default()).unwrap_err()
    ));
}

#[test]
fn indices_out_of_range_are_refused() {
    let x = numbers(&[2, 3], 1);
    let config = CrossEntropyConfig::default();
    for bad in [-1_i64, 3] {
        let index = Tensor::new(&[0, bad], &Device::Cpu).unwrap();
        let error = crate::cross_entropy(&x, &index, &config).unwrap_err();
        assert!(matches!(error, Error::Index { index, position: 1, limit: 3, .. } if index == bad));
        let error = crate::embedding(&x, &index).unwrap_err();
        assert!(matches!(error, Error::Index { index, position: 1, limit: 2, .. } if index == bad));
    }
}

#[test]
fn what_gets_no_gradient_must_not_want_one() {
    let is_gradient = |error: Error| matches!(error, Error::Gradient { .. });
    let x = numbers(&[1, 2, 3, 4], 1);
    let var = |shape: &[usize]| Var::from_tensor(&numbers(shape, 1)).unwrap();
    let config = AttentionConfig::default().with_mask(var(&[2, 2]).as_tensor().clone());
    assert!(is_gradient(crate::attention(&x, &x, &x, &config).unwrap_err()));
    assert!(is_gradient(crate::rope(&x, &var(&[3, 2]), &numbers(&[3, 2], 1)).unwrap_err()));
    let targets = Tensor::new(&[0_u32, 2], &Device::Cpu).unwrap();
    let config = CrossEntropyConfig::default().with_class_weights(var(&[3]).as_tensor().clone());
    assert!(is_gradient(
        crate::cross_entropy(&numbers(&[2, 3], 1), &targets, &config).unwrap_err()
    ));
}

#[test]
fn an_error_becomes_candle_s_and_keeps_its_words() {
    let error = crate::rms_norm(&numbers(&[2, 3], 1), &numbers(&[4], 1), 1e-5).unwrap_err();
    let words = "rms_norm: weight has the shape [4], expected [3]";
    assert_eq!(error.to_string(), words);
    assert!(candle_core::Error::from(error).to_string().starts_with(words));
}

#[test]
fn an_mlp_with_frozen_parameters_gives_the_others_their_gradients() {
    let var = |shape: &[usize], seed| Var::from_tensor(&numbers(shape, seed)).unwrap();
    let x = var(&[1, 3], 1);
    let up_bias = var(&[4], 2);
    let down = var(&[2, 4], 3);
    let up = numbers(&[4, 3], 4);
    let down_bias = numbers(&[2], 5);
    let relu = Activation::Relu;
    let y = crate::mlp(&x, &up, Some(&up_bias), relu, &down, Some(&down_bias)).unwrap();
    let middle = crate::linear(&x, &up, Some(&up_bias), Some(relu)).unwrap();
    let expected = crate::linear(&middle, &down, Some(&down_bias), None).unwrap();
    let [found, expected] =
        [y, expected].map(|y| y.sqr().unwrap().sum_all().unwrap().backward().unwrap());
    for var in [&x, &up_bias, &down] {
        assert_eq!(values(found.get(var).unwrap()), values(expected.get(var).unwrap()));
    }
    assert!(found.get(&up).is_none() && found.get(&down_bias).is_none());
}

#[test]
fn a_gated_mlp_has_the_bits_of_its_parts_and_frozen_parameters_have_no_gradient() {
    let var = |shape: &[usize], seed| Var::from_tensor(&numbers(shape, seed)).unwrap();
    let (x, gate, down, residual) =
        (var(&[2, 3], 1), var(&[4, 3], 2), var(&[2, 4], 3), var(&[2, 2], 5));
    let up = numbers(&[4, 3], 4);
    let y = crate::swiglu_mlp(&x, &gate, &up, &down, Some(&residual)).unwrap();
    let linear = |x: &Tensor, weight: &Tensor| crate::linear(x, weight, None, None).unwrap();
    let middle = crate::swiglu(&linear(&x, &gate), &linear(&x, &up)).unwrap();
    let expected = (linear(&middle, &down) + residual.as_tensor()).unwrap();
    assert_eq!(values(&y), values(&expected));
    let [found, expected] =
        [y, expected].map(|y| y.sqr().unwrap().sum_all().unwrap().backward().unwrap());
    for var in [&x, &gate, &down, &residual] {
        assert_eq!(values(found.get(var).unwrap()), values(expected.get(var).unwrap()));
    }
    assert!(found.get(&up).is_none());
}

#[test]
fn the_parts_of_attention_have_the_bits_of_their_operations() {
    let var = |shape: &[usize], seed| Var::from_tensor(&numbers(shape, seed)).unwrap();
    let [x, weight, residual, norm] =
        [(&[1, 3, 5][..], 1), (&[4, 5], 2), (&[1, 3, 4], 3), (&[4], 4)]
            .map(|(shape, seed)| var(shape, seed));
    let angles = numbers(&[3, 1], 6);
    let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
    let project = || crate::linear(&x, &weight, None, None).unwrap();
    let rotated = crate::linear_rope(&x, &weight, None, &cos, &sin).unwrap();
    let heads = project().reshape((1, 3, 2, 2)).unwrap();
    let (sum, normed) = crate::linear_add_rms_norm(&x, &weight, &residual, &norm, 1e-5).unwrap();
    let parts = crate::add_rms_norm(&project(), &residual, &norm, 1e-5).unwrap();
    let pairs = [
        (rotated, crate::rope_thd(&heads, &cos, &sin).unwrap()),
        ((sum * normed).unwrap(), (parts.0 * parts.1).unwrap()),
    ];
    for (found, expected) in pairs {
        assert_eq!(values(&found), values(&expected));
        let [found, expected] =
            [found, expected].map(|y| y.sqr().unwrap().sum_all().unwrap().backward().unwrap());
        for var in [&x, &weight, &residual, &norm] {
            let [found, expected] = [&found, &expected].map(|grads| grads.get(var).map(values));
            assert_eq!(found, expected);
        }
    }
}
