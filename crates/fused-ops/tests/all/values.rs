//! Results and gradients that are known, or have the bits of others.

use candle_core::{DType, Device, Tensor, Var};
use fused_ops::{Activation, AttentionConfig, CrossEntropyConfig, DropoutKey};

use crate::support::{numbers, values};

#[test]
fn empty_rows_stay_empty() {
    let x = numbers(&[3, 0], 1);
    let weight = numbers(&[0], 1);
    assert_eq!(fused_ops::rms_norm(&x, &weight, 1e-5).unwrap().dims(), [3, 0]);
    assert_eq!(fused_ops::layer_norm(&x, &weight, Some(&weight), 1e-5).unwrap().dims(), [3, 0]);
    assert_eq!(fused_ops::softmax(&x, 1).unwrap().dims(), [3, 0]);
    assert_eq!(fused_ops::gelu(&x).unwrap().dims(), [3, 0]);
    let y = fused_ops::linear(&x, &numbers(&[2, 0], 1), Some(&numbers(&[2], 1)), None).unwrap();
    let bias = values(&numbers(&[2], 1));
    assert_eq!(values(&y), [bias.clone(), bias.clone(), bias].concat());
}

#[test]
fn decoding_takes_any_shape() {
    let (x, weight) = (numbers(&[2, 1, 3], 1), numbers(&[3, 4], 2).t().unwrap());
    let bias = numbers(&[4], 3);
    let found = fused_ops::linear_decode(&x, &[(&weight, Some(&bias))]).unwrap();
    let expected = fused_ops::linear(&x, &weight, Some(&bias), None).unwrap();
    assert_eq!(found[0].dims(), [2, 1, 4]);
    let differences = values(&(&found[0] - &expected).unwrap());
    assert!(differences.into_iter().all(|off| off.abs() < 1e-14));
    let [x, weight] = [&x, &weight].map(|tensor| tensor.to_dtype(DType::BF16).unwrap());
    let found = fused_ops::linear_decode(&x, &[(&weight, None)]).unwrap();
    let expected = fused_ops::linear(&x, &weight, None, None).unwrap();
    assert_eq!(values(&found[0]), values(&expected));
    let (wide, narrow) = (numbers(&[0, 3], 1), numbers(&[2, 0], 1));
    assert_eq!(fused_ops::linear_decode(&wide, &[(&wide, None)]).unwrap()[0].dims(), [0, 0]);
    let y = fused_ops::linear_decode(&narrow, &[(&numbers(&[4, 0], 1), Some(&bias))]).unwrap();
    assert_eq!(values(&y[0]), [values(&bias), values(&bias)].concat());
}

#[test]
fn empty_weights_may_start_past_storage() {
    let x = numbers(&[1, 2, 3], 1);
    let rows = numbers(&[0, 5], 1).narrow(1, 2, 3).unwrap();
    let [no_rows, width] = [numbers(&[3, 0, 3], 1), numbers(&[0, 3], 1)]
        .map(|x| x.narrow(x.rank() - 1, 1, 1).unwrap().squeeze(x.rank() - 1).unwrap());
    let dims = |y: fused_ops::Result<Tensor>| y.unwrap().dims().to_vec();
    assert_eq!(dims(fused_ops::linear(&x, &rows, Some(&width), None)), [1, 2, 0]);
    assert_eq!(
        dims(fused_ops::mlp(&x, &rows, Some(&width), Activation::Silu, &no_rows, None)),
        [1, 2, 3]
    );
    assert_eq!(dims(fused_ops::swiglu_mlp(&x, &rows, &rows, &no_rows, None)), [1, 2, 3]);
    let residual = numbers(&[1, 2, 0], 1);
    let (sum, norm) = fused_ops::linear_add_rms_norm(&x, &rows, &residual, &width, 1e-5).unwrap();
    assert_eq!((sum.dims(), norm.dims()), (&[1, 2, 0][..], &[1, 2, 0][..]));
}

#[test]
fn activations_of_infinity() {
    let x = Tensor::new(&[f32::INFINITY, f32::NAN], &Device::Cpu).unwrap();
    for form in [fused_ops::gelu, fused_ops::gelu_tanh, fused_ops::silu] {
        let y = form(&x).unwrap().to_vec1::<f32>().unwrap();
        assert!(y[0] == f32::INFINITY && y[1].is_nan());
    }
}

#[test]
fn fully_masked_attention_is_nan() {
    let x = numbers(&[1, 2, 1, 4], 1);
    let mask = Tensor::new(&[[f64::NEG_INFINITY; 2], [0.0; 2]], &Device::Cpu).unwrap();
    let y = fused_ops::attention(&x, &x, &x, &AttentionConfig::default().with_mask(mask)).unwrap();
    let y = values(&y);
    assert!(y[..4].iter().all(|y| y.is_nan()) && y[4..].iter().all(|y| y.is_finite()));

    // Scores that are all −∞ in the first block of keys, but not in the second.
    let query = numbers(&[1, 1, 1, 4], 2);
    let key = numbers(&[1, 300, 1, 4], 3);
    let mask = (0..300).map(|key| if key < 290 { f64::NEG_INFINITY } else { 0.0 });
    let mask = Tensor::from_iter(mask, &Device::Cpu).unwrap();
    let config = AttentionConfig::default().with_mask(mask);
    let found = fused_ops::attention(&query, &key, &key, &config).unwrap();
    let last = key.narrow(1, 290, 10).unwrap();
    let expected = fused_ops::attention(&query, &last, &last, &AttentionConfig::default()).unwrap();
    assert!(values(&(found - expected).unwrap()).into_iter().all(|off| off.abs() < 1e-14));
}

#[test]
fn zero_weight_row_may_be_nan() {
    let logits = Tensor::new(&[[1.0, 1.0], [f64::NAN, 0.0]], &Device::Cpu).unwrap();
    let logits = Var::from_tensor(&logits).unwrap();
    let targets = Tensor::new(&[0_u32, 0], &Device::Cpu).unwrap();
    let weights = Tensor::new(&[1.0, 0.0], &Device::Cpu).unwrap();
    let config = CrossEntropyConfig::default().with_row_weights(weights);
    let loss = fused_ops::cross_entropy(&logits, &targets, &config).unwrap();
    assert!((loss.mean().unwrap().to_scalar::<f64>().unwrap() - 2.0_f64.ln()).abs() < 1e-15);
    let grads = loss.sum.backward().unwrap();
    let grad = values(grads.get(&logits).unwrap());
    assert!(grad.iter().zip([-0.5, 0.5, 0.0, 0.0]).all(|(a, b)| (a - b).abs() < 1e-15), "{grad:?}");
}

#[test]
fn head_loss_equals_both_operations() {
    // 128 rows per block, so three blocks, of which the last one is small.
    let (rows, hidden, classes) = (260, 5, 20_000);
    let var = |shape: &[usize], seed| Var::from_tensor(&numbers(shape, seed)).unwrap();
    let (x, weight) = (var(&[rows, hidden], 1), var(&[classes, hidden], 2));
    let targets =
        Tensor::from_iter((0..260_u32).map(|row| row * 77 % 19_999), &Device::Cpu).unwrap();
    let config = CrossEntropyConfig::default().with_ignore_index(77);
    let found = fused_ops::linear_cross_entropy(&x, &weight, &targets, &config).unwrap();
    let logits = fused_ops::linear(&x, &weight, None, None).unwrap();
    let expected = fused_ops::cross_entropy(&logits, &targets, &config).unwrap();
    assert_eq!((found.weight, expected.weight), (259.0, 259.0));
    let scaled = |loss: &Tensor| (loss * 0.3).unwrap();
    let (found, expected) = (scaled(&found.sum), scaled(&expected.sum));
    assert!((values(&found)[0] - values(&expected)[0]).abs() < 1e-11);
    let expected = expected.backward().unwrap();
    // The second backward pass computes the gradients again.
    for _ in 0..2 {
        let found = found.backward().unwrap();
        for var in [&x, &weight] {
            let [found, expected] = [&found, &expected].map(|grads| grads.get(var).unwrap());
            let off = values(&(found - expected).unwrap()).into_iter().map(f64::abs);
            assert!(off.fold(0.0, f64::max) < 1e-13);
        }
    }
}

#[test]
fn ignored_head_rows_may_be_nan() {
    let x = Tensor::new(&[[1.0, 1.0], [f64::NAN, 0.0]], &Device::Cpu).unwrap();
    let x = Var::from_tensor(&x).unwrap();
    let weight = Var::ones((3, 2), DType::F64, &Device::Cpu).unwrap();
    let config = CrossEntropyConfig::default().with_ignore_index(-100);
    let targets = Tensor::new(&[0_i64, -100], &Device::Cpu).unwrap();
    let loss = fused_ops::linear_cross_entropy(&x, &weight, &targets, &config).unwrap();
    assert!((loss.mean().unwrap().to_scalar::<f64>().unwrap() - 3.0_f64.ln()).abs() < 1e-15);
    let grads = loss.sum.backward().unwrap();
    assert!(values(grads.get(&weight).unwrap()).into_iter().all(f64::is_finite));
    assert_eq!(values(grads.get(&x).unwrap())[2..], [0.0, 0.0]);
    let ignored = Tensor::new(&[-100_i64, -100], &Device::Cpu).unwrap();
    let loss = fused_ops::linear_cross_entropy(&x, &weight, &ignored, &config).unwrap();
    assert_eq!((loss.weight, values(&loss.sum)), (0.0, vec![0.0]));
    let grads = loss.sum.backward().unwrap();
    assert!(values(grads.get(&weight).unwrap()).into_iter().all(|grad| grad == 0.0));
}

#[test]
fn losses_of_many_half_rows_keep_digits() {
    for half in [DType::F16, DType::BF16] {
        let logits = Var::zeros((20_000, 100), half, &Device::Cpu).unwrap();
        let targets = Tensor::zeros(20_000, DType::U32, &Device::Cpu).unwrap();
        let loss =
            fused_ops::cross_entropy(&logits, &targets, &CrossEntropyConfig::default()).unwrap();
        let mean = loss.mean().unwrap();
        assert_eq!(mean.dtype(), DType::F32);
        let off = mean.to_scalar::<f32>().unwrap() - 100_f32.ln();
        assert!(off.abs() < 1e-6, "{half:?}: {off}");
        let grads = mean.backward().unwrap();
        assert_eq!(grads.get(&logits).unwrap().dtype(), half);
    }
}

#[test]
fn repeated_rows_sum_in_f32() {
    for half in [DType::F16, DType::BF16] {
        let table = Var::zeros((2, 3), half, &Device::Cpu).unwrap();
        let indices = Tensor::ones(1000, DType::U32, &Device::Cpu).unwrap();
        let grads = fused_ops::embedding(&table, &indices).unwrap().backward().unwrap();
        // A sum of ones in bf16 stops at 256.
        assert_eq!(values(grads.get(&table).unwrap()), [0.0, 0.0, 0.0, 1000.0, 1000.0, 1000.0]);
    }
}

#[test]
fn dropped_elements_are_pinned() {
    let x = Tensor::ones(12, DType::F32, &Device::Cpu).unwrap();
    let dropped = |seed, call| {
        let y = fused_ops::dropout(&x, 0.5, DropoutKey { seed, call, offset: 0 }).unwrap();
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
fn largest_offset_is_valid() {
    let x = Tensor::ones(1000, DType::F32, &Device::Cpu).unwrap();
    let key = DropoutKey { seed: 0, call: 0, offset: u64::MAX };
    let zeros = values(&fused_ops::dropout(&x, 0.5, key).unwrap());
    assert!((400..600).contains(&zeros.iter().filter(|&&y| y == 0.0).count()));
}

#[test]
fn ranges_drop_differently() {
    let x = Tensor::ones(40_000, DType::F32, &Device::Cpu).unwrap();
    let key = DropoutKey { seed: 0, call: 0, offset: 0 };
    let y = values(&fused_ops::dropout(&x, 0.5, key).unwrap());
    let first = &y[..64];
    assert!(y[64..].chunks_exact(64).all(|other| other != first));
}

#[test]
fn drop_rate_matches_probability() {
    let x = Tensor::ones(100_000, DType::F32, &Device::Cpu).unwrap();
    for probability in [0.0, 0.1, 0.5, 0.9] {
        let key = DropoutKey { seed: 3, call: 1, offset: 0 };
        let y = fused_ops::dropout(&x, probability, key).unwrap();
        let zeros = values(&y).iter().filter(|&&y| y == 0.0).count() as f64;
        assert!((zeros / 1e5 - probability).abs() < 0.006, "{zeros} of {probability}");
    }
}
