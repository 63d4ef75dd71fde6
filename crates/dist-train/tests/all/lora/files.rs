//! Adapters in separate files, merged into weights, and in checkpoints.

use std::{collections::BTreeMap, fs, path::Path};

use candle_core::{DType, Device, Tensor, safetensors};
use candle_nn::{Module, VarBuilder, linear_no_bias};
use dist_train::{DataParallel, FullyShard, Lora, PretrainedFiles, UnitRules, Units};
use pmap_mesh::{DeviceMesh, Replica};
use serde_json::Value;

use super::{BLOCKS, batch, block, lora, loss, loss_by_units, model, sgd, sharded, whole};
use crate::support::saved;

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    safetensors::load(path, &Device::Cpu).unwrap().into_iter().collect()
}

fn numbers(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Evaluates the saved weights without adapters.
fn plain_loss(folder: &Path, x: Tensor) -> f64 {
    let mesh = DeviceMesh::cpu(1).unwrap();
    let builder = DataParallel::builder(&mesh, model).by_units(UnitRules::new());
    let mut model = builder.dtype(DType::F64).weights(folder).build(sgd).unwrap();
    let evaluated = model.evaluate(x, |_: &Replica, model: &Units, x| {
        loss(&(0..BLOCKS).try_fold(x, |x, n| model.unit(&format!("h.{n}"), &x, block))?)
    });
    evaluated.unwrap().loss
}

#[test]
fn files_contain_adapters_or_sums() {
    let (lora, mesh) = (lora(), DeviceMesh::cpu(2).unwrap());
    let loss = loss_by_units(&lora, block);
    let mut model = sharded(&mesh, &lora);
    for step in 0..5 {
        model.step(batch(step), &loss).unwrap();
    }
    let trained = model.evaluate(batch(7), &loss).unwrap().loss;
    let folder = tempfile::tempdir().unwrap();
    let [base, merged] = ["base", "merged"].map(|name| folder.path().join(name));

    model.save_pretrained(&base, PretrainedFiles::default()).unwrap();
    let all = tensors(&base.join("model.safetensors"));
    model.save_pretrained(&base, lora.adapters()).unwrap();
    let expected = ["adapter_config.json", "adapter_model.safetensors", "model.safetensors"];
    assert_eq!(names(&base), expected, "existing files stay");
    let adapters = tensors(&base.join("adapter_model.safetensors"));
    assert_eq!(
        adapters.keys().collect::<Vec<_>>(),
        ["0.mlp.up.lora_A", "0.mlp.up.lora_B", "1.mlp.up.lora_A", "1.mlp.up.lora_B"]
            .map(|name| format!("base_model.model.h.{name}.weight"))
            .iter()
            .collect::<Vec<_>>()
    );
    for (name, values) in &adapters {
        let name = name.strip_prefix("base_model.model.").unwrap();
        assert_eq!(numbers(values), numbers(&all[name]));
    }

    model.save_pretrained(&merged, lora.merged()).unwrap();
    assert_eq!(names(&merged), ["model.safetensors"]);
    let plain = plain_loss(&merged, batch(7));
    assert!((plain - trained).abs() < 1e-12, "{plain} and {trained}");

    // A model loaded from the saved weights and adapters.
    let again = Lora::open(&base).unwrap();
    assert_eq!(again.adapters(), lora.adapters());
    let builder = FullyShard::builder(&mesh, again.adapt(super::model)).dtype(DType::F64);
    let builder = builder.weights(base.join("model.safetensors"));
    let builder = builder.allow_unexpected(Lora::PATTERNS).allow_missing(Lora::PATTERNS);
    let mut again =
        builder.init_with(again.values()).train_only(Lora::PATTERNS).build(sgd).unwrap();
    assert_eq!(again.evaluate(batch(7), &loss).unwrap().loss.to_bits(), trained.to_bits());
}

#[test]
fn bf16_weights_merge_in_f32() {
    let mesh = DeviceMesh::cpu(1).unwrap();
    // bf16 would round this alpha to 1.
    let lora = Lora::new(["q"], 1, 1.001_953_125).unwrap().with_base_dtype(DType::BF16);
    let layer = |vb: VarBuilder<'_>| linear_no_bias(2, 2, vb.pp("q"));
    let builder = DataParallel::builder(&mesh, lora.adapt(layer)).by_units(UnitRules::new());
    let model = builder.init_with(|declared, items| {
        // The sum adds slightly more than half the distance from 1 to the next bf16 number.
        let value = if declared.name == "q.weight" { 1.0 } else { 0.0625 };
        Tensor::full(value, items.len(), &Device::Cpu)?.to_dtype(declared.dtype)
    });
    let model = model.train_only(Lora::PATTERNS).build(sgd).unwrap();
    let folder = tempfile::tempdir().unwrap();
    model.save_pretrained(folder.path(), lora.merged()).unwrap();
    let merged = tensors(&folder.path().join("model.safetensors"));
    assert_eq!(merged.keys().collect::<Vec<_>>(), ["q.weight"]);
    // In bf16 the sum would be 1.00390625, a tie that rounds to 1.
    assert_eq!(numbers(&merged["q.weight"]), [1.007_812_5; 4]);
    assert_eq!(merged["q.weight"].dtype(), DType::BF16);
}

#[test]
fn checkpoints_contain_only_adapters() {
    let lora = lora();
    let loss = loss_by_units(&lora, block);
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model = sharded(&mesh, &lora);
    for step in 0..3 {
        model.step(batch(step), &loss).unwrap();
    }
    let checkpoint = saved(&mesh, &model);
    let expected = model.step(batch(3), &loss).unwrap().loss;
    let matrices = [("lora_A", vec![2, 4]), ("lora_B", vec![6, 2])];
    let of_block =
        |n| matrices.clone().map(|(name, shape)| (format!("h.{n}.mlp.up.{name}.weight"), shape));
    let adapters: BTreeMap<_, _> = [0, 1].into_iter().flat_map(of_block).collect();
    checkpoint.check_fits(&mesh, &adapters).unwrap();

    let mut again = sharded(&DeviceMesh::cpu(4).unwrap(), &lora);
    again.load(&checkpoint).unwrap();
    let found = again.step(batch(3), &loss).unwrap().loss;
    assert!((found - expected).abs() < 1e-12, "{found} and {expected}");
    let mut again = whole(&mesh, &lora);
    again.load(&checkpoint).unwrap();
    assert_eq!(again.step(batch(3), &loss).unwrap().loss.to_bits(), expected.to_bits());
    again.load(&checkpoint).unwrap();
    saved(&mesh, &again).check_fits(&mesh, &adapters).unwrap();
}

/// Builds the projections that PEFT's golden adapters target.
fn projections(vb: VarBuilder<'_>) -> candle_core::Result<()> {
    for n in 0..2 {
        let attention = vb.pp(format!("model.layers.{n}.self_attn"));
        for (name, n_out) in [("q_proj", 32), ("k_proj", 16), ("v_proj", 16), ("o_proj", 32)] {
            linear_no_bias(32, n_out, attention.pp(name))?;
        }
    }
    Ok(())
}

#[test]
fn peft_adapters_round_trip() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/all/lora/golden");
    let lora = Lora::open(&golden).unwrap();
    assert_eq!(lora.adapters(), Lora::new(["q_proj", "v_proj"], 4, 8.0).unwrap().adapters());
    let mesh = DeviceMesh::cpu(1).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let [base, adapter] = ["base", "adapter"].map(|name| folder.path().join(name));
    let plain = FullyShard::builder(&mesh, projections).unit("all", ["model"]).build(sgd);
    plain.unwrap().save_pretrained(&base, PretrainedFiles::default()).unwrap();

    let builder = FullyShard::builder(&mesh, lora.adapt(projections)).weights(&base);
    let builder = builder.allow_missing(Lora::PATTERNS).init_with(lora.values());
    let mut model = builder.train_only(Lora::PATTERNS).build(sgd).unwrap();
    model.save_pretrained(&adapter, lora.adapters()).unwrap();
    let (expected, found) = (&golden, &adapter);
    let [expected_tensors, found_tensors] =
        [expected, found].map(|folder| tensors(&folder.join("adapter_model.safetensors")));
    assert_eq!(found_tensors.len(), 8);
    for (name, expected) in &expected_tensors {
        assert_eq!(numbers(&found_tensors[name]), numbers(expected), "{name}");
    }
    let config = |folder: &Path| -> Value {
        let text = fs::read_to_string(folder.join("adapter_config.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let (expected_config, found_config) = (config(expected), config(found));
    for field in ["peft_type", "r", "bias", "fan_in_fan_out", "target_modules", "lora_dropout"] {
        assert_eq!(found_config[field], expected_config[field], "{field}");
    }
    assert_eq!(found_config["lora_alpha"].as_f64(), expected_config["lora_alpha"].as_f64());

    // The output of an adapted layer.
    let base = tensors(&base.join("model.safetensors"));
    let matrix = |name: &str| {
        expected_tensors[&format!("base_model.model.model.layers.1.self_attn.v_proj.{name}.weight")]
            .to_dtype(DType::F64)
            .unwrap()
    };
    let weight = base["model.layers.1.self_attn.v_proj.weight"].to_dtype(DType::F64).unwrap();
    let sum = matrix("lora_B").matmul(&matrix("lora_A")).unwrap().affine(2.0, 0.0).unwrap();
    let expected = (weight + sum).unwrap();
    let unit = lora.unit(|vb: VarBuilder<'_>, x: &Tensor| {
        linear_no_bias(32, 16, vb.pp("self_attn.v_proj"))?.forward(x)
    });
    let ones = Tensor::eye(32, DType::F32, &Device::Cpu).unwrap();
    let projected = model
        .evaluate(ones, move |_: &Replica, model: &Units, x: Tensor| {
            let y = model.unit("model.layers.1", &x, unit.clone())?;
            Ok(dist_train::Loss::mean(y.sum_all()?).with_rows(y))
        })
        .unwrap();
    let found = numbers(&projected.aux.t().unwrap());
    for (found, expected) in found.into_iter().zip(numbers(&expected)) {
        assert!((found - expected).abs() < 1e-6, "{found} and {expected}");
    }
}
