//! Random models on a mesh match one device, in double and half precision: with unused, frozen and
//! tied variables, clipping, and accumulated batches that are weighted, uneven, padded or empty.

use candle_core::DType;
use pmap_mesh::DeviceMesh;

use crate::random::{Case, assert_near};

/// The variable with the number of sharded cases for each number of slots.
const RANDOM_MODELS: &str = "RANDOM_MODELS";

#[test]
fn f64_models_match_one_device() {
    for slots in 1..=4 {
        let mesh = DeviceMesh::builder().axis("rows", slots).pin(false).cpu().unwrap();
        for seed in 0..20 {
            let seed = seed * 4 + slots as u64;
            let case = Case::new(seed, slots, DType::F64);
            let name = format!("case {seed} on {slots} slots");
            assert_near(&case.on_mesh(&mesh), &case.on_one_device(), 1e-11, &name);
        }
    }
}

/// Losses and parameters of sharded models, with any `Keep`, equal those of replicated models: to
/// the bit, or up to rounding with tied layers, clipping or accumulated batches. In bf16, dozens of
/// operations round to 8 bits.
#[test]
fn sharded_models_match_replicated_models() {
    let n_cases = std::env::var(RANDOM_MODELS).ok().and_then(|number| number.parse().ok());
    let n_cases = n_cases.unwrap_or(48);
    let mut n_equal = 0;
    for slots in 1..=4 {
        let mesh = DeviceMesh::builder().axis("rows", slots).pin(false).cpu().unwrap();
        for seed in 0..n_cases {
            let (dtype, tolerance) =
                [(DType::F64, 1e-11), (DType::F32, 1e-4), (DType::BF16, 1e-1), (DType::F16, 2e-2)]
                    [seed as usize % 4];
            let case = Case::new((1 << 32) + seed * 4 + slots as u64, slots, dtype);
            let case = if seed % 8 < 4 { case.with_equal_bits() } else { case };
            let name = format!("{dtype:?} case {seed} on {slots} slots, {:?}", case.keep);
            let [sharded, replicated] = [true, false].map(|sharded| case.by_units(&mesh, sharded));
            if case.has_equal_bits() {
                n_equal += 1;
                let bits = |found| case.bits_without_norms(found);
                assert_eq!(bits(&sharded), bits(&replicated), "{name}");
            }
            assert_near(&sharded, &replicated, tolerance, &name);
            assert_near(&sharded, &case.on_one_device(), tolerance, &name);
        }
    }
    assert!(n_equal >= 2 * n_cases, "{n_equal} cases have equal bits");
}
