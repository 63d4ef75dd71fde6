//! Results have the same bits for any number of threads, for wide and narrow vectors, and for a
//! part as in the whole.

use candle_core::{DType, Tensor};
use rayon::ThreadPoolBuilder;

use super::support::{
    AttentionSizes, OpCase, OpOutcome, attention_cases, rope_cases, row_cases, run, values,
};
use crate::{kernels::WITHOUT_DISPATCH, ops::linear::grouped::ExpertWeights};

/// Returns cases that the kernels split into several blocks.
fn cases() -> Vec<OpCase> {
    let sizes =
        AttentionSizes { batch: 3, queries: 70, keys: 300, key_heads: 2, group: 2, size: 16 };
    let mut cases = row_cases(300, 129);
    cases.extend(rope_cases(3, 4, 50, 20));
    cases.extend(attention_cases(sizes));
    cases
}

/// Returns the inputs of a case in f32.
fn single_inputs(case: &OpCase) -> Vec<Tensor> {
    case.inputs(5).iter().map(|x| x.to_dtype(DType::F32).unwrap()).collect()
}

/// Returns the bits of a result and of all gradients.
fn bits(outcome: &OpOutcome) -> Vec<u64> {
    let all = [&outcome.y].into_iter().chain(&outcome.grads);
    all.flat_map(values).map(f64::to_bits).collect()
}

fn with_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}

#[test]
fn are_independent_of_thread_count() {
    let all = |threads| {
        with_threads(threads, || {
            cases()
                .iter()
                .map(|case| bits(&run(&case.fused, &single_inputs(case))))
                .collect::<Vec<_>>()
        })
    };
    let one = all(1);
    for threads in [2, 3, 8] {
        assert!(one == all(threads), "{threads} threads");
    }
}

#[test]
fn are_independent_of_vector_width() {
    with_threads(1, || {
        for case in cases() {
            let wide = bits(&run(&case.fused, &single_inputs(&case)));
            WITHOUT_DISPATCH.set(true);
            let narrow = bits(&run(&case.fused, &single_inputs(&case)));
            WITHOUT_DISPATCH.set(false);
            assert!(wide == narrow, "{}", case.name);
        }
    });
}

#[test]
fn rows_are_independent() {
    let forward = |x: &Tensor, weight: &Tensor| {
        let x = crate::rms_norm(x, weight, 1e-5)?;
        let x = crate::linear(&x, weight.unsqueeze(0)?.repeat((9, 1))?.as_ref(), None, None)?;
        crate::softmax(&crate::gelu(&x)?, 1)
    };
    let case = &row_cases(301, 77)[0];
    let inputs = single_inputs(case);
    let expected = forward(&inputs[0], &inputs[1]).unwrap();
    for (start, len) in [(0, 1), (5, 1), (17, 2), (100, 150), (300, 1)] {
        let part = forward(&inputs[0].narrow(0, start, len).unwrap(), &inputs[1]).unwrap();
        assert_eq!(values(&part), values(&expected.narrow(0, start, len).unwrap()));
    }
}

#[test]
fn sequences_are_independent() {
    let sizes =
        AttentionSizes { batch: 3, queries: 70, keys: 70, key_heads: 2, group: 2, size: 16 };
    let case = attention_cases(sizes).remove(4);
    let inputs = single_inputs(&case);
    let whole = (case.fused)(&inputs).unwrap();
    for sequence in 0..3 {
        let single: Vec<_> = inputs.iter().map(|x| x.narrow(0, sequence, 1).unwrap()).collect();
        let single = (case.fused)(&single).unwrap();
        assert_eq!(values(&single), values(&whole.narrow(0, sequence, 1).unwrap()));
    }
}

#[test]
fn packed_attention_equals_separate() {
    let sizes = AttentionSizes { batch: 2, queries: 70, keys: 70, key_heads: 2, group: 2, size: 8 };
    let packed = attention_cases(sizes).pop().unwrap();
    let qkv = &single_inputs(&packed)[0];
    let part = |start: usize, heads: usize| {
        qkv.narrow(2, start * 8, heads * 8).unwrap().reshape((2, 70, heads, 8)).unwrap()
    };
    let query = part(0, 4);
    let key = part(4, 2);
    let value = part(6, 2);
    let config = crate::AttentionConfig::causal();
    let separate = crate::attention(&query, &key, &value, &config).unwrap();
    assert_eq!(values(&(packed.fused)(std::slice::from_ref(qkv)).unwrap()), values(&separate));
}

#[test]
fn rows_of_experts_have_the_bits_of_their_layers() {
    let inputs = single_inputs(&row_cases(300, 129)[0]);
    let x = &inputs[0];
    let weights = [x.narrow(0, 0, 70).unwrap(), x.narrow(0, 90, 70).unwrap()];
    let halves = weights.each_ref().map(|weight| weight.to_dtype(DType::BF16).unwrap());
    for weights in [weights, halves] {
        let y = crate::grouped_linear(x, ExpertWeights::Separate(&weights), &[33, 267]).unwrap();
        for (start, rows, weight) in [(0, 33, &weights[0]), (33, 267, &weights[1])] {
            let x = x.narrow(0, start, rows).unwrap();
            let alone = crate::linear(&x, &weight.to_dtype(DType::F32).unwrap(), None, None);
            assert_eq!(values(&y.narrow(0, start, rows).unwrap()), values(&alone.unwrap()));
        }
    }
}

#[test]
fn decoded_rows_are_independent() {
    let case = &row_cases(40, 300)[0];
    let x = &single_inputs(case)[0];
    let weight = x.repeat((20, 1)).unwrap();
    let bias = weight.narrow(1, 3, 1).unwrap().flatten_all().unwrap();
    let layers = [(&weight, None), (x, None), (&weight, Some(&bias))];
    let all = |threads| with_threads(threads, || crate::linear_decode(x, &layers).unwrap());
    let expected = all(1);
    for (y, &(weight, bias)) in expected.iter().zip(&layers) {
        let plain = crate::linear(x, weight, bias, None).unwrap();
        let near = |(a, b): (f64, f64)| (a - b).abs() < 1e-5 * (1.0 + b.abs());
        assert!(values(y).into_iter().zip(values(&plain)).all(near));
        for row in [0, 7, 39] {
            let alone = x.narrow(0, row, 1).unwrap();
            let alone = crate::linear_decode(&alone, &[(weight, bias)]).unwrap();
            assert_eq!(values(&alone[0]), values(&y.narrow(0, row, 1).unwrap()));
        }
    }
    let narrow = with_threads(1, || {
        WITHOUT_DISPATCH.set(true);
        crate::linear_decode(x, &layers).unwrap()
    });
    for others in [narrow, all(2), all(3)] {
        assert!(others.iter().zip(&expected).all(|(a, b)| values(a) == values(b)));
    }
}
