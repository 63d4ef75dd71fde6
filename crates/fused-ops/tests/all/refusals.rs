//! Operations refuse inputs that do not fit, with an error that names them.

use candle_core::{DType, Device, Tensor, Var};
use fused_ops::{
    Activation, AttentionConfig, CrossEntropyConfig, DropoutKey, Error, ExpertWeights,
};

use crate::support::numbers;

#[test]
fn wrong_shapes_are_rejected() {
    let x = numbers(&[2, 3], 1);
    let bad = numbers(&[4], 1);
    let is_shape = |error: Error| matches!(error, Error::Shape { .. });
    assert!(is_shape(fused_ops::rms_norm(&x, &bad, 1e-5).unwrap_err()));
    assert!(is_shape(fused_ops::rms_norm(&numbers(&[], 1), &bad, 1e-5).unwrap_err()));
    assert!(is_shape(fused_ops::layer_norm(&x, &numbers(&[3], 1), Some(&bad), 1e-5).unwrap_err()));
    assert!(is_shape(fused_ops::linear(&x, &numbers(&[3, 4], 1), None, None).unwrap_err()));
    assert!(is_shape(fused_ops::linear(&x, &numbers(&[3, 3], 1), Some(&bad), None).unwrap_err()));
    let short = numbers(&[5, 4], 1);
    assert!(is_shape(fused_ops::linear_decode(&x, &[(&short, None)]).unwrap_err()));
    let middle = |up: &[usize], down: &[usize], bias: Option<&Tensor>| {
        let up = numbers(up, 1);
        let down = numbers(down, 1);
        is_shape(fused_ops::mlp(&x, &up, bias, Activation::Relu, &down, None).unwrap_err())
    };
    assert!(middle(&[5, 4], &[3, 5], None));
    assert!(middle(&[5, 3], &[3, 6], None));
    assert!(middle(&[5, 3], &[3, 5], Some(&bad)));
    assert!(is_shape(fused_ops::swiglu(&x, &bad).unwrap_err()));
    let gated = |gate: &[usize], up: &[usize], down: &[usize]| {
        let [gate, up, down] = [gate, up, down].map(|shape| numbers(shape, 1));
        is_shape(fused_ops::swiglu_mlp(&x, &gate, &up, &down, None).unwrap_err())
            && is_shape(fused_ops::swiglu_mlp(&x, &gate, &up, &down, Some(&x)).unwrap_err())
    };
    assert!(gated(&[5, 4], &[5, 3], &[3, 5]));
    assert!(gated(&[5, 3], &[6, 3], &[3, 5]));
    assert!(gated(&[5, 3], &[5, 3], &[3, 6]));
    let [gate, down] = [[5, 3], [3, 5]].map(|shape| numbers(&shape, 1));
    assert!(is_shape(fused_ops::swiglu_mlp(&x, &gate, &gate, &down, Some(&bad)).unwrap_err()));
    let joined = |weight: &[usize], residual: &[usize], norm: &[usize]| {
        let [weight, residual, norm] = [weight, residual, norm].map(|shape| numbers(shape, 1));
        let error =
            fused_ops::linear_add_rms_norm(&x, &weight, &residual, &norm, 1e-5).unwrap_err();
        is_shape(error)
    };
    assert!(joined(&[5, 4], &[2, 5], &[5]));
    assert!(joined(&[5, 3], &[2, 3], &[5]));
    assert!(joined(&[5, 3], &[2, 5], &[3]));
    let projected = |x: &[usize], weight: &[usize], bias: Option<&Tensor>, cos: &[usize]| {
        let [x, weight, cos] = [x, weight, cos].map(|shape| numbers(shape, 1));
        is_shape(fused_ops::linear_rope(&x, &weight, bias, 4, &cos, &cos).unwrap_err())
    };
    assert!(projected(&[2, 3], &[4, 3], None, &[2, 1]));
    assert!(projected(&[1, 2, 3], &[4, 2], None, &[2, 1]));
    assert!(projected(&[1, 2, 3], &[6, 3], None, &[2, 2]));
    assert!(projected(&[1, 2, 3], &[8, 3], Some(&bad), &[2, 1]));
    assert!(projected(&[1, 2, 3], &[4, 3], None, &[1, 1]));
    assert!(projected(&[1, 2, 3], &[4, 3], None, &[2, 0]));
    assert!(projected(&[1, 2, 3], &[4, 3], None, &[2, 3]));
    assert!(projected(&[1, 2, 3], &[4, 3], None, &[2]));
    for (counts, stacked) in [(&[1, 2][..], &x), (&[2], &x), (&[1, 1], &numbers(&[2, 5, 4], 1))] {
        let experts = ExpertWeights::Stacked(stacked);
        assert!(is_shape(fused_ops::grouped_linear(&x, experts, counts).unwrap_err()));
    }
    assert!(is_shape(fused_ops::rope(&x, &x, &x).unwrap_err()));
    assert!(is_shape(fused_ops::rope(&numbers(&[1, 1, 3, 4], 1), &x, &x).unwrap_err()));
    assert!(is_shape(fused_ops::embedding(&bad, &bad).unwrap_err()));
    let packed = numbers(&[1, 2, 7], 1);
    let config = AttentionConfig::default();
    assert!(is_shape(fused_ops::attention_packed(&packed, 1, 1, &config).unwrap_err()));
    let few = numbers(&[1, 2, 3, 4], 1);
    let many = numbers(&[1, 5, 3, 4], 1);
    let causal = AttentionConfig::causal();
    assert!(is_shape(fused_ops::attention(&many, &few, &few, &causal).unwrap_err()));
    assert!(is_shape(fused_ops::attention(&few, &many, &few, &config).unwrap_err()));
    let two_heads = numbers(&[1, 5, 2, 4], 1);
    assert!(is_shape(fused_ops::attention(&few, &two_heads, &two_heads, &config).unwrap_err()));
    let masked = config.clone().with_mask(numbers(&[9, 9], 1));
    assert!(is_shape(fused_ops::attention(&few, &many, &many, &masked).unwrap_err()));
    let sinks = config.clone().with_sinks(numbers(&[2], 1));
    assert!(is_shape(fused_ops::attention(&few, &many, &many, &sinks).unwrap_err()));
    let lengths = config.with_key_lengths(vec![1, 1]);
    assert!(is_shape(fused_ops::attention(&few, &many, &many, &lengths).unwrap_err()));
}

#[test]
fn wrong_dtypes_are_rejected() {
    let x = numbers(&[2, 3], 1);
    let single = numbers(&[3], 1).to_dtype(DType::F32).unwrap();
    let is_dtype = |error: Error| matches!(error, Error::DType { .. });
    assert!(is_dtype(fused_ops::rms_norm(&x, &single, 1e-5).unwrap_err()));
    assert!(is_dtype(fused_ops::gelu(&x.to_dtype(DType::U32).unwrap()).unwrap_err()));
    assert!(is_dtype(fused_ops::embedding(&x, &single).unwrap_err()));
    let config = CrossEntropyConfig::default();
    let targets = numbers(&[2], 1);
    assert!(is_dtype(fused_ops::cross_entropy(&x, &targets, &config).unwrap_err()));
    let classes = Tensor::new(&[0_u32, 1], &Device::Cpu).unwrap();
    let weight = x.to_dtype(DType::BF16).unwrap();
    assert!(is_dtype(fused_ops::linear_cross_entropy(&x, &weight, &classes, &config).unwrap_err()));
}

#[test]
fn invalid_settings_are_rejected() {
    let x = numbers(&[2, 3], 1);
    let is_setting = |error: Error| matches!(error, Error::OutOfRange { .. });
    let key = DropoutKey { seed: 0, call: 0, offset: 0 };
    for probability in [-0.1, 1.0, f64::NAN] {
        assert!(is_setting(fused_ops::dropout(&x, probability, key).unwrap_err()));
    }
    let targets = Tensor::new(&[0_u32, 2], &Device::Cpu).unwrap();
    let config = CrossEntropyConfig::default;
    for invalid in [
        config().with_label_smoothing(1.1),
        config().with_logit_scale(0.0),
        config().with_softcap(f64::INFINITY),
    ] {
        assert!(is_setting(fused_ops::cross_entropy(&x, &targets, &invalid).unwrap_err()));
    }
    let ignoring = CrossEntropyConfig::default()
        .with_row_weights(Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap());
    assert!(is_setting(
        fused_ops::cross_entropy(&x, &targets, &ignoring).unwrap().mean().unwrap_err()
    ));
    let qkv = numbers(&[1, 2, 3, 4], 1);
    for length in [0, 3] {
        let config = AttentionConfig::default().with_key_lengths(vec![length]);
        assert!(is_setting(fused_ops::attention(&qkv, &qkv, &qkv, &config).unwrap_err()));
    }
    let causal = AttentionConfig::causal();
    let windowed = AttentionConfig::default().with_window(2);
    for config in [causal.clone().with_window(0), windowed, causal.with_softcap(0.0)] {
        assert!(is_setting(fused_ops::attention(&qkv, &qkv, &qkv, &config).unwrap_err()));
    }
    let packed = numbers(&[1, 2, 9], 1);
    assert!(is_setting(
        fused_ops::attention_packed(&packed, 3, 2, &AttentionConfig::default()).unwrap_err()
    ));
}

#[test]
fn indexes_out_of_range_are_rejected() {
    let x = numbers(&[2, 3], 1);
    let config = CrossEntropyConfig::default();
    let message = |op: &str, bad: i64, limit: usize| {
        format!("{op}: the index at position 1 is {bad}, it must be at least 0 and below {limit}")
    };
    for bad in [-1_i64, 3] {
        let index = Tensor::new(&[0, bad], &Device::Cpu).unwrap();
        let error = fused_ops::cross_entropy(&x, &index, &config).unwrap_err();
        assert_eq!(error.to_string(), message("cross_entropy", bad, 3));
        let error = fused_ops::embedding(&x, &index).unwrap_err();
        assert_eq!(error.to_string(), message("embedding", bad, 2));
    }
}

#[test]
fn constant_inputs_must_not_track_gradients() {
    let is_gradient = |error: Error| matches!(error, Error::Gradient { .. });
    let x = numbers(&[1, 2, 3, 4], 1);
    let var = |shape: &[usize]| Var::from_tensor(&numbers(shape, 1)).unwrap();
    let config = AttentionConfig::default().with_mask(var(&[2, 2]).as_tensor().clone());
    assert!(is_gradient(fused_ops::attention(&x, &x, &x, &config).unwrap_err()));
    assert!(is_gradient(fused_ops::rope(&x, &var(&[3, 2]), &numbers(&[3, 2], 1)).unwrap_err()));
    let (row, weight) = (numbers(&[1, 3], 1), var(&[5, 3]));
    assert!(is_gradient(fused_ops::linear_decode(&row, &[(&weight, None)]).unwrap_err()));
    let targets = Tensor::new(&[0_u32, 2], &Device::Cpu).unwrap();
    let config = CrossEntropyConfig::default().with_class_weights(var(&[3]).as_tensor().clone());
    assert!(is_gradient(
        fused_ops::cross_entropy(&numbers(&[2, 3], 1), &targets, &config).unwrap_err()
    ));
}

#[test]
fn errors_convert_to_candle_errors() {
    let error = fused_ops::rms_norm(&numbers(&[2, 3], 1), &numbers(&[4], 1), 1e-5).unwrap_err();
    let words = "rms_norm: weight has the shape [4], expected [3]";
    assert_eq!(error.to_string(), words);
    assert!(candle_core::Error::from(error).to_string().starts_with(words));
}
