//! Training with adapters, compared with the formula: a low-rank term in each layer, candle's
//! gradients, and an explicit update.

use std::collections::BTreeMap;

use candle_core::{DType, Result, Tensor, Var};
use candle_nn::VarBuilder;
use dist_train::Lora;
use pmap_mesh::DeviceMesh;

use super::{BLOCKS, RATE, batch, block, fused_block, lora, loss, loss_by_units, sharded, whole};

const STEPS: usize = 20;

type NamedValues = BTreeMap<String, Tensor>;

/// The losses of a run and its final variables.
type Outcome = (Vec<f64>, NamedValues);

/// Trains on one device with candle's operations.
fn naive(start: &NamedValues, scale: f64) -> Result<Outcome> {
    let vars: BTreeMap<&String, Var> = start
        .iter()
        .filter(|(name, _)| name.contains("lora_"))
        .map(|(name, value)| Ok((name, Var::from_tensor(value)?)))
        .collect::<Result<_>>()?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut x = batch(step);
        for n in 0..BLOCKS {
            let get = |name: &str| &start[&format!("h.{n}.mlp.{name}")];
            let var = |name: &str| vars[&format!("h.{n}.mlp.{name}")].as_tensor();
            let product = x.matmul(&get("up.weight").t()?)?.broadcast_add(get("up.bias"))?;
            let low = x.matmul(&var("up.lora_A.weight").t()?)?;
            let adapted = (low.matmul(&var("up.lora_B.weight").t()?)? * scale)?;
            x = (product + adapted)?.tanh()?.matmul(&get("down.weight").t()?)?;
        }
        let loss = loss(&x)?;
        losses.push(loss.to_scalar()?);
        let grads = loss.backward()?;
        for var in vars.values() {
            let step = (grads.get(var).unwrap() * RATE)?;
            var.set(&(var.as_tensor() - step)?)?;
        }
    }
    let trained = vars.into_iter().map(|(name, var)| (name.clone(), var.as_detached_tensor()));
    let mut values = start.clone();
    values.extend(trained);
    Ok((losses, values))
}

#[track_caller]
fn check_close((found, values): &Outcome, (expected, expected_values): &Outcome) {
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6 * expected.abs(), "{found} and {expected}");
    }
    assert_eq!(values.keys().collect::<Vec<_>>(), expected_values.keys().collect::<Vec<_>>());
    for (name, expected) in expected_values {
        let numbers = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        for (found, expected) in numbers(&values[name]).into_iter().zip(numbers(expected)) {
            assert!((found - expected).abs() < 1e-6, "{name}: {found} and {expected}");
        }
    }
}

/// Copies the values in double precision, because later steps change the variables.
fn copied(values: NamedValues) -> NamedValues {
    let copy = |value: Tensor| value.to_dtype(DType::F64).unwrap().copy().unwrap();
    values.into_iter().map(|(name, value)| (name, copy(value))).collect()
}

/// Trains both layouts and compares them with the formula and, to the bit, with each other.
fn check_layouts(lora: &Lora, block: fn(VarBuilder<'_>, &Tensor) -> Result<Tensor>) {
    let loss = loss_by_units(lora, block);
    for slots in [1, 2, 4] {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        let mut model = whole(&mesh, lora);
        let start = copied(model.parameters().unwrap());
        let expected = naive(&start, 1.5).unwrap();
        let moved = expected.1["h.0.mlp.up.lora_B.weight"].abs().unwrap().max_all().unwrap();
        assert!(moved.to_scalar::<f64>().unwrap() > 0.01, "{moved}");
        let losses: Vec<f64> =
            (0..STEPS).map(|step| model.step(batch(step), &loss).unwrap().loss).collect();
        check_close(&(losses.clone(), copied(model.parameters().unwrap())), &expected);

        let mut model = sharded(&mesh, lora);
        let sharded_losses: Vec<f64> =
            (0..STEPS).map(|step| model.step(batch(step), &loss).unwrap().loss).collect();
        assert_eq!(sharded_losses, losses);
        let gathered =
            start.keys().map(|name| (name.clone(), model.parameter(name).unwrap())).collect();
        check_close(&(losses, copied(gathered)), &expected);
    }
}

#[test]
fn both_layouts_match_the_formula() {
    check_layouts(&lora(), block);
    check_layouts(&lora(), fused_block);
}

#[test]
fn half_precision_bases_match_the_formula() {
    let lora = lora().with_base_dtype(DType::BF16);
    let model = whole(&DeviceMesh::cpu(1).unwrap(), &lora);
    let dtype = |name: &str| model.parameters().unwrap()[name].dtype();
    assert_eq!(
        ["up.weight", "up.bias", "down.weight"].map(|name| dtype(&format!("h.0.mlp.{name}"))),
        [DType::BF16, DType::F64, DType::F64]
    );
    check_layouts(&lora, block);
    check_layouts(&lora, fused_block);
}

#[test]
fn initial_values_match_peft() {
    let model = whole(&DeviceMesh::cpu(1).unwrap(), &Lora::new(["up"], 64, 1.0).unwrap());
    let numbers = |name: &str| -> Vec<f64> {
        model.parameters().unwrap()[name].flatten_all().unwrap().to_vec1().unwrap()
    };
    assert!(numbers("h.0.mlp.up.lora_B.weight").iter().all(|&number| number == 0.0));
    let bound = 0.5; // one over the root of four inputs
    let a = numbers("h.1.mlp.up.lora_A.weight");
    let largest = a.iter().fold(0.0, |largest: f64, number| largest.max(number.abs()));
    assert!(0.95 * bound < largest && largest <= bound, "{largest}");
    let mean = a.iter().sum::<f64>() / a.len() as f64;
    assert!(mean.abs() < 0.1 * bound, "{mean}");
}
