//! Kernels agree with the composed form in f64; in f32, both forms have errors of similar size.

use candle_core::{DType, Tensor, Var};
use proptest::{prelude::*, test_runner::RngSeed};

use super::support::{
    AttentionSizes, OpCase, OpOutcome, all_cases, attention_case, attention_cases, numbers,
    relative_error, rope_cases, row_cases, run, run_on, values,
};
use crate::{config::AttentionConfig, error::Result, route::ARE_COMPOSED};

/// The tolerance of f32 relative to f64, as a fraction of the largest element.
const F32: f64 = 2e-6;

/// The tolerance between two summation orders in f64, for rows of up to 100,000 numbers.
const F64: f64 = 1e-11;

/// Checks the two forms of an operation against each other in both types.
fn check(case: &OpCase, seed: u64) {
    let inputs = case.inputs(seed);
    let reference = run(&case.composed, &inputs);
    compare(case, &run(&case.fused, &inputs), &reference, &|_, _| F64);

    let single: Vec<_> = inputs.iter().map(|x| x.to_dtype(DType::F32).unwrap()).collect();
    let rounded: Vec<_> = single.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
    let reference = run(&case.composed, &rounded);
    // The rounding error of a product grows with its factors, and carries over to results computed
    // from it.
    let composed = run(&case.composed, &single);
    let limit = |pick: Pick, input| {
        F32.max(1.5 * relative_error(pick(&composed, input), pick(&reference, input)))
    };
    compare(case, &run(&case.fused, &single), &reference, &limit);
}

/// Compares a result and the gradients of all inputs with another form.
fn compare(case: &OpCase, found: &OpOutcome, reference: &OpOutcome, limit: &Limit<'_>) {
    let check = |name: &str, pick: Pick, input| {
        let difference = relative_error(pick(found, input), pick(reference, input));
        let limit = limit(pick, input);
        assert!(
            difference <= limit,
            "{}: {name} {input}: {difference:e}, at most {limit:e}",
            case.name
        );
    };
    check("result", |outcome, _| &outcome.y, 0);
    for input in 0..reference.grads.len() {
        check("the gradient of input", |outcome, input| &outcome.grads[input], input);
    }
}

/// One tensor of an outcome: its result, or the gradient of an input.
type Pick = fn(&OpOutcome, usize) -> &Tensor;

/// The tolerance of a tensor.
type Limit<'a> = dyn Fn(Pick, usize) -> f64 + 'a;

/// Every run uses the same shapes, because a rounding bound is tight for some shape among many.
fn config() -> ProptestConfig {
    ProptestConfig { rng_seed: RngSeed::Fixed(1), ..ProptestConfig::with_cases(8) }
}

proptest! {
    #![proptest_config(config())]

    // Heads have at least 8 elements: gradients of smaller heads are differences of nearly equal
    // numbers.

    #[test]
    fn row_operations(rows in 1..40_usize, width in 8..150_usize, seed in 1..1000_u64) {
        for case in row_cases(rows, width) {
            check(&case, seed);
        }
    }

    #[test]
    fn rotations(
        batch in 1..3_usize, heads in 1..5_usize, length in 1..9_usize, half in 1..40_usize,
        seed in 1..1000_u64,
    ) {
        for case in rope_cases(batch, heads, length, half) {
            check(&case, seed);
        }
    }

    #[test]
    fn attention(
        batch in 1..3_usize, queries in 1..150_usize, more in 1..150_usize, key_heads in 1..3_usize,
        group in 1..4_usize, size in 8..40_usize, seed in 1..1000_u64,
    ) {
        let keys = queries + more;
        for case in attention_cases(AttentionSizes { batch, queries, keys, key_heads, group, size }) {
            check(&case, seed);
        }
    }
}

#[test]
fn many_and_long_rows() {
    for (rows, width) in [(1, 100_000), (3, 20_011), (700, 64), (2_000, 33)] {
        for case in row_cases(rows, width) {
            check(&case, 1);
        }
    }
}

#[test]
fn narrow_rows() {
    // Norms are left out: gradients of narrow norms are differences of nearly equal numbers. Miri
    // takes minutes for one width.
    let (rows, widths) = if cfg!(miri) { (2, 3..4) } else { (9, 1..8) };
    for width in widths {
        for case in row_cases(rows, width).into_iter().filter(|case| !case.name.contains("norm")) {
            check(&case, 1);
        }
    }
}

#[test]
fn attention_over_several_key_blocks() {
    let sizes =
        AttentionSizes { batch: 2, queries: 200, keys: 700, key_heads: 1, group: 2, size: 8 };
    for case in attention_cases(sizes) {
        check(&case, 1);
    }
    // Not a single key: the gradient of its query would be only rounding errors.
    let fewer_keys = AttentionSizes { queries: 90, keys: 3, ..sizes };
    for case in attention_cases(fewer_keys) {
        check(&case, 2);
    }
}

#[test]
fn halves_are_rounded_once() {
    for half in [DType::F16, DType::BF16] {
        for case in all_cases() {
            let inputs: Vec<_> = case.inputs(1).iter().map(|x| x.to_dtype(half).unwrap()).collect();
            let single: Vec<_> = inputs.iter().map(|x| x.to_dtype(DType::F32).unwrap()).collect();
            let found = (case.fused)(&inputs).unwrap();
            let expected = (case.fused)(&single).unwrap();
            // A sum over rows keeps its digits.
            let is_sum = case.name.contains("cross_entropy");
            let rounded = if is_sum { DType::F32 } else { half };
            assert_eq!(found.dtype(), rounded);
            let expected = expected.to_dtype(rounded).unwrap();
            assert_eq!(values(&found), values(&expected), "{}", case.name);
            let grads = run(&case.fused, &inputs).grads;
            assert!(grads.iter().all(|grad| grad.dtype() == half));
        }
    }
}

#[test]
fn windows_begin_and_end_anywhere() {
    for (queries, keys) in [(1, 700), (90, 90), (130, 600)] {
        for window in [1, 5, 64, 257, 900] {
            let sizes = AttentionSizes { batch: 1, queries, keys, key_heads: 1, group: 2, size: 8 };
            let config = AttentionConfig::causal().with_window(window);
            let full = AttentionConfig::causal();
            let case = attention_case(format!("window {window} {sizes:?}"), sizes, config);
            let inputs = case.inputs(1);
            let found = run(&case.fused, &inputs);
            // A window of one key has no gradient of queries and keys.
            compare(&case, &found, &run(&case.composed, &inputs), &|_, _| F64);
            if window >= keys {
                let full = attention_case(String::new(), sizes, full);
                compare(&case, &found, &run(&full.fused, &inputs), &|_, _| 0.0);
            }
        }
    }
}

#[test]
fn norm_weight_may_be_wider_than_halves() {
    type Form = fn(&[Tensor]) -> Result<Tensor>;
    let forms: [Form; 3] = [
        |t| crate::rms_norm(&t[0], &t[1], 1e-5),
        |t| Ok(crate::add_rms_norm(&t[0], &t[0], &t[1], 1e-5)?.1),
        |t| Ok(crate::linear_add_rms_norm(&t[0], &t[2], &t[0], &t[1], 1e-5)?.1),
    ];
    let inputs = [[3, 8], [1, 8], [8, 8]].map(|shape| numbers(&shape, 1).to_dtype(DType::F32));
    let [x, weight, matrix] = inputs.map(|input| input.unwrap());
    let weight = weight.squeeze(0).unwrap().affine(1e-3, 1.0).unwrap();
    for (half, form) in
        [DType::F16, DType::BF16].into_iter().flat_map(|half| forms.map(|f| (half, f)))
    {
        let [x, matrix] = [&x, &matrix].map(|tensor| tensor.to_dtype(half).unwrap());
        let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap();
        let expected = form(&[wide(&x), weight.clone(), wide(&matrix)]).unwrap();
        for is_composed in [false, true] {
            ARE_COMPOSED.set(is_composed);
            let found = run(&(Box::new(form) as _), &[x.clone(), weight.clone(), matrix.clone()]);
            ARE_COMPOSED.set(false);
            assert_eq!((found.y.dtype(), found.grads[1].dtype()), (half, DType::F32));
            if !is_composed {
                assert_eq!(values(&found.y), values(&expected.to_dtype(half).unwrap()));
            }
            assert!(relative_error(&found.y, &expected) < 2e-2);
        }
    }
}

/// Returns the same values at an offset, and with other strides.
fn views(x: &Tensor) -> [Tensor; 2] {
    let padded = Tensor::cat(&[x.narrow(0, 0, 1).unwrap(), x.clone()], 0).unwrap();
    let offset = padded.narrow(0, 1, x.dims()[0]).unwrap();
    let last = x.rank() - 1;
    let strided = x.transpose(0, last).unwrap().contiguous().unwrap().transpose(0, last).unwrap();
    [offset, strided]
}

#[test]
fn views_are_read_correctly() {
    for case in all_cases() {
        let inputs = case.inputs(2);
        let expected = run(&case.fused, &inputs);
        for kind in 0..2 {
            let vars: Vec<_> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
            let tensors: Vec<_> = vars.iter().map(|var| views(var)[kind].clone()).collect();
            compare(&case, &run_on(&case.fused, &tensors, &vars), &expected, &|_, _| 0.0);
        }
    }
}

#[test]
fn attention_reads_heads_with_any_strides() {
    let sizes = AttentionSizes { batch: 2, queries: 5, keys: 5, key_heads: 2, group: 1, size: 8 };
    let case = &attention_cases(sizes)[4];
    let inputs = case.inputs(2);
    let expected = run(&case.fused, &inputs);
    let vars: Vec<_> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let strided: candle_core::Result<Vec<_>> =
        vars.iter().map(|var| var.transpose(1, 2)?.contiguous()?.transpose(1, 2)).collect();
    let strided = strided.unwrap();
    assert!(!strided[0].is_contiguous());
    compare(case, &run_on(&case.fused, &strided, &vars), &expected, &|_, _| 0.0);
}

#[test]
fn only_needed_gradients_are_computed() {
    for case in all_cases() {
        let inputs = case.inputs(4);
        let expected = run(&case.fused, &inputs);
        for wanted in 0..inputs.len() {
            let var = Var::from_tensor(&inputs[wanted]).unwrap();
            let mut tensors = inputs.clone();
            tensors[wanted] = var.as_tensor().clone();
            let found = run_on(&case.fused, &tensors, std::slice::from_ref(&var));
            assert_eq!(relative_error(&found.y, &expected.y), 0.0, "{}", case.name);
            assert_eq!(
                relative_error(&found.grads[0], &expected.grads[wanted]),
                0.0,
                "{}",
                case.name
            );
        }
        assert!(!(case.fused)(&inputs).unwrap().track_op());
    }
}

/// Checks the forms of devices without kernels, here on the CPU.
fn check_composed(case: &OpCase, seed: u64) {
    let inputs = case.inputs(seed);
    let reference = run(&case.composed, &inputs);
    ARE_COMPOSED.set(true);
    let found = run(&case.fused, &inputs);
    ARE_COMPOSED.set(false);
    compare(case, &found, &reference, &|_, _| F64);
}

#[test]
fn forms_of_other_devices_match_the_references() {
    for (rows, width) in [(1, 9), (40, 64), (700, 33)] {
        for case in row_cases(rows, width) {
            check_composed(&case, 1);
        }
    }
    for case in rope_cases(2, 3, 5, 4) {
        check_composed(&case, 2);
    }
    let sizes = AttentionSizes { batch: 2, queries: 20, keys: 70, key_heads: 2, group: 2, size: 8 };
    for case in attention_cases(sizes) {
        check_composed(&case, 3);
    }
}

#[test]
fn halves_of_other_devices_match_the_kernels() {
    for (half, tolerance) in [(DType::F16, 2.5e-3), (DType::BF16, 2e-2)] {
        for case in all_cases() {
            let inputs: Vec<_> = case.inputs(1).iter().map(|x| x.to_dtype(half).unwrap()).collect();
            let expected = run(&case.fused, &inputs);
            ARE_COMPOSED.set(true);
            let found = run(&case.fused, &inputs);
            ARE_COMPOSED.set(false);
            compare(&case, &found, &expected, &|_, _| tolerance);
        }
    }
}

/// Devices without our kernels run the composed form.
#[cfg(any(feature = "cuda", feature = "metal"))]
#[test]
fn other_devices_match_the_processor() {
    use candle_core::Device;

    let devices = [Device::new_cuda(0), Device::new_metal(0)];
    if devices.iter().all(Result::is_err) {
        eprintln!("there is no device to compare with");
    }
    for device in devices.into_iter().flatten() {
        for case in all_cases() {
            let single: Vec<_> =
                case.inputs(3).iter().map(|x| x.to_dtype(DType::F32).unwrap()).collect();
            let other: Vec<_> = single.iter().map(|x| x.to_device(&device).unwrap()).collect();
            let local = run(&case.fused, &single);
            let other = run(&case.fused, &other);
            let back = |x: &Tensor| x.to_device(&Device::Cpu).unwrap();
            let other =
                OpOutcome { y: back(&other.y), grads: other.grads.iter().map(back).collect() };
            compare(&case, &other, &local, &|_, _| 1e-5);
        }
    }
}
