//! Training with adapters, compared with the formula: a low-rank term in each layer, candle's
//! gradients, and an explicit update.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Module, Optimizer, VarBuilder};
use dist_train::{DataParallel, Lora};
use fused_ops::layers::Linear;
use pmap_mesh::{DeviceMesh, Replica};

use super::{
    BLOCKS, RATE, batch, block, fused_block, lora, loss, loss_by_units, sgd, sharded, whole,
};

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

struct AdaptedBlock {
    up: Linear,
    down: Linear,
}

fn blocks(lora: &Lora, vb: VarBuilder<'_>) -> Result<Vec<AdaptedBlock>> {
    let mut blocks = Vec::with_capacity(BLOCKS);
    for n in 0..BLOCKS {
        let vb = vb.pp(format!("h.{n}.mlp"));
        let down = fused_ops::layers::linear_no_bias(6, 4, vb.pp("down"))?;
        blocks.push(AdaptedBlock { up: lora.linear(4, 6, vb.pp("up"))?, down });
    }
    Ok(blocks)
}

#[test]
fn adapted_layer_matches_the_formula() {
    let lora = lora();
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = DataParallel::builder(&mesh, |vb| blocks(&lora, vb));
    let builder = builder.dtype(DType::F64).train_only(Lora::PATTERNS);
    let mut model = builder.build(sgd).unwrap();
    let start = copied(model.parameters().unwrap());
    let expected = naive(&start, 1.5).unwrap();
    let block_loss = |_: &Replica, model: &Vec<AdaptedBlock>, mut x: Tensor| {
        for block in model {
            x = block.down.forward(&block.up.forward(&x)?.tanh()?)?;
        }
        loss(&x)
    };
    let losses = (0..STEPS).map(|step| model.step(batch(step), block_loss).unwrap().loss).collect();
    check_close(&(losses, model.parameters().unwrap()), &expected);
}

#[test]
fn bf16_weights_have_f32_adapters() {
    let lora = Lora::new(["up"], 1, 1.0).unwrap();
    let mesh = DeviceMesh::cpu(2).unwrap();
    // The weight alternates in sign, so the output is the adapter's: 64 times 2⁻⁹. A step changes
    // `lora_A` by less than the distance of bf16 numbers at 1.
    let builder = DataParallel::builder(&mesh, |vb| lora.linear_no_bias(64, 2, vb.pp("up")));
    let builder = builder.dtype(DType::BF16).init_with(|declared, items| {
        let values = items.map(|item| match declared.name.as_str() {
            "up.weight" if item % 2 == 1 => -1.0,
            "up.lora_B.weight" => 1.0 / 512.0,
            _ => 1.0,
        });
        Tensor::from_iter(values, &Device::Cpu)?.to_dtype(declared.dtype)
    });
    let builder = builder.train_only(Lora::PATTERNS);
    let mut model = builder.build(|group| candle_nn::SGD::new(group.vars, 0.05)).unwrap();
    assert_eq!(
        ["up.weight", "up.lora_A.weight", "up.lora_B.weight"]
            .map(|name| model.parameters().unwrap()[name].dtype()),
        [DType::BF16, DType::F32, DType::F32]
    );
    let x = Tensor::ones((4, 64), DType::BF16, &Device::Cpu).unwrap();
    let step = model.step(x, |_: &Replica, layer: &Linear, x| {
        let y = layer.forward(&x)?;
        assert_eq!(y.dtype(), DType::BF16);
        y.to_dtype(DType::F32)?.mean_all()
    });
    assert_eq!(step.unwrap().loss.to_bits(), 0.125_f64.to_bits());
    let a = model.parameters().unwrap()["up.lora_A.weight"].to_vec2::<f32>().unwrap()[0][0];
    assert!(0.999_9 < a && a < 1.0, "{a}");
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

/// Adds to 1 slightly more than half the distance to the next bf16 number.
#[test]
fn adapted_sum_is_rounded_once() {
    let item = |value: f32, dtype| Tensor::full(value, (1, 1), &Device::Cpu)?.to_dtype(dtype);
    let lora = Lora::new(["up"], 1, 1.0).unwrap();
    let product = 2_f32.powi(-8) + 2_f32.powi(-18);
    let tensors = [
        ("weight", item(1.0, DType::BF16)),
        ("lora_A.weight", item(1.0, DType::F32)),
        ("lora_B.weight", item(product, DType::F32)),
    ];
    let tensors = tensors.map(|(name, item)| (name.to_owned(), item.unwrap()));
    let vb = VarBuilder::from_tensors(tensors.into(), DType::BF16, &Device::Cpu);
    let layer = lora.linear_no_bias(1, 1, vb).unwrap();
    let y = layer.forward(&item(1.0, DType::BF16).unwrap()).unwrap();
    let found: f32 = y.to_dtype(DType::F32).unwrap().sum_all().unwrap().to_scalar().unwrap();
    assert_eq!(found.to_bits(), (1.0 + 2_f32.powi(-7)).to_bits());
}
