//! Random models on a mesh match one device, in double and half precision: with unused, frozen and
//! tied variables, clipping, and accumulated batches that are weighted, uneven, padded or empty.

use candle_core::DType;
use pmap_mesh::DeviceMesh;

use crate::random::{Case, assert_near};

/// Runs `cases` cases on each of one to four slots.
fn check(cases: u64, dtype: DType, tolerance: f64) {
    for slots in 1..=4 {
        let mesh = DeviceMesh::builder().axis("rows", slots).pin(false).cpu().unwrap();
        for seed in 0..cases {
            let seed = seed * 4 + slots as u64;
            let case = Case::new(seed, slots, dtype);
            let name = format!("case {seed} on {slots} slots");
            assert_near(&case.on_mesh(&mesh), &case.on_one_device(), tolerance, &name);
        }
    }
}

#[test]
fn f64_models_match_one_device() {
    check(40, DType::F64, 1e-11);
}

/// bf16 has 8 bits of precision, and dozens of operations round to it.
#[test]
fn half_precision_models_match_one_device() {
    check(16, DType::F16, 2e-2);
    check(16, DType::BF16, 1e-1);
}
