//! Gradients in f64 are the slopes that finite differences find.

use candle_core::{Device, Tensor};
use proptest::prelude::*;

use super::support::{
    AttentionSizes, OpCase, attention_cases, numbers, rope_cases, row_cases, run, values,
};

/// The step of the differences: about the third root of the precision, where truncation and
/// rounding are equally large.
const STEP: f64 = 1e-5;

/// Checks some elements of each input's gradient.
fn check(case: &OpCase, seed: u64) {
    let inputs = case.inputs(seed);
    let grads = run(&case.fused, &inputs).grads;
    for (input, grad) in grads.iter().enumerate() {
        let grad = values(grad);
        let n = inputs[input].elem_count();
        let largest = grad.iter().fold(1.0_f64, |largest, x| largest.max(x.abs()));
        for pick in 0..5 {
            let element = (pick * 7919 + seed as usize) % n;
            let slope = difference(case, &inputs, input, element);
            let difference = (slope - grad[element]).abs() / largest;
            assert!(
                difference <= 1e-6,
                "{}: input {input}, element {element}: {difference:e}",
                case.name
            );
        }
    }
}

/// Returns the derivative, by one element, of the sum that [`run`] differentiates.
fn difference(case: &OpCase, inputs: &[Tensor], input: usize, element: usize) -> f64 {
    let shifted = |change: f64| {
        let mut shifted_inputs = inputs.to_vec();
        let mut elements = values(&inputs[input]);
        elements[element] += change;
        shifted_inputs[input] =
            Tensor::from_vec(elements, inputs[input].shape(), &Device::Cpu).unwrap();
        let y = (case.fused)(&shifted_inputs).unwrap();
        let seed = values(&numbers(y.dims(), 77));
        values(&y).iter().zip(seed).map(|(y, seed)| y * seed).sum::<f64>()
    };
    (shifted(STEP) - shifted(-STEP)) / (2.0 * STEP)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn row_operations(rows in 1..8_usize, width in 2..70_usize, seed in 1..1000_u64) {
        // Frozen weights have no gradient; `agreement` compares the others of their layers.
        let cases = row_cases(rows, width).into_iter();
        for case in cases.filter(|case| !["lora", "adapter"].iter().any(|n| case.name.contains(n))) {
            check(&case, seed);
        }
    }

    #[test]
    fn rotations(heads in 1..4_usize, length in 1..6_usize, half in 1..9_usize, seed in 1..1000_u64) {
        for case in rope_cases(2, heads, length, half) {
            check(&case, seed);
        }
    }

    #[test]
    fn attention(
        queries in 1..80_usize, more in 0..10_usize, key_heads in 1..3_usize, group in 1..3_usize,
        size in 1..9_usize, seed in 1..1000_u64,
    ) {
        let sizes =
            AttentionSizes { batch: 2, queries, keys: queries + more, key_heads, group, size };
        for case in attention_cases(sizes) {
            check(&case, seed);
        }
    }
}
