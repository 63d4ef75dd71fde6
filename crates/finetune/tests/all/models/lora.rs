//! Fine-tuning of adapters, and the saved files.

use std::{collections::BTreeMap, path::Path};

use candle_core::{Device, IndexOp, Tensor, Var, safetensors};
use dist_train::{DataParallel, Lora};
use finetune::models::{ModelError, Tokens};
use pmap_mesh::{DeviceMesh, Uneven};
use tempfile::TempDir;

use crate::models::{
    golden::{Golden, MODELS, distance, ids},
    training::{STEPS, assert_near, batch, loss, optimizer, rate},
};

#[test]
fn adapters_learn_like_peft() {
    for model in MODELS {
        let golden = Golden::open(model);
        let (steps, saved) = train(&golden);
        check(&golden, &steps, saved.path(), model);
    }
}

#[test]
fn unknown_layers_get_no_adapters() {
    let golden = Golden::open("llama");
    let mesh = DeviceMesh::cpu(1).unwrap();
    let lora = Lora::new(["q_proj", "query"], 4, 8.).unwrap();
    let llama = golden.llama.clone().with_lora(lora).unwrap();
    let builder = DataParallel::builder(&mesh, |vb| llama.declare(&vb)).by_units(llama.units());
    let rejected = builder.weights(&golden.folder).build(optimizer).unwrap_err().to_string();
    assert!(rejected.contains("query"), "{rejected}");
}

/// A merged adapter of a tied weight would change the embedding too.
#[test]
fn embeddings_get_no_adapters() {
    for (model, target, tied) in [
        ("llama", "embed_tokens", false),
        ("qwen2", "embed_tokens", true),
        ("qwen2", "model.embed_tokens", true),
        ("qwen2", "lm_head", true),
    ] {
        let lora = Lora::new(["q_proj", target], 4, 8.).unwrap();
        let rejected = Golden::open(model).llama.with_lora(lora).unwrap_err();
        let is_named = matches!(rejected, ModelError::Adapter { layer, is_tied }
            if layer.ends_with(target) && is_tied == tied);
        assert!(is_named, "{rejected}");
    }
    let head = Lora::new(["lm_head"], 4, 8.).unwrap();
    assert!(Golden::open("llama").llama.with_lora(head).is_ok());
}

/// Checks losses and norms of steps, the adapters in a folder, and the logits of the merged model.
fn check(golden: &Golden, steps: &[(f64, f64)], saved: &Path, what: &str) {
    let expected = &golden.expected["lora"];
    assert_near(expected, steps, [1e-5, 1e-5], what);

    let read = |folder: &Path| {
        safetensors::load(folder.join("adapter_model.safetensors"), &Device::Cpu).unwrap()
    };
    let found = read(&saved.join("adapter"));
    let adapters = read(&golden.folder.join("adapter_final"));
    assert_eq!(found.len(), adapters.len(), "{what}");
    for (name, matrix) in &adapters {
        let difference = distance(&found[name], matrix);
        assert!(difference < 5e-6, "{what}: {name}: {difference}");
    }

    let merged = safetensors::load(saved.join("merged/model.safetensors"), &Device::Cpu).unwrap();
    let merged: BTreeMap<String, Var> = merged
        .into_iter()
        .map(|(name, tensor)| (name, Var::from_tensor(&tensor).unwrap()))
        .collect();
    let units = golden.units(&merged);
    let rows = &golden.expected["logits"][0];
    let tokens = Tokens::rows(ids(&Golden::rows(&rows["input_ids"])));
    let logits = golden.llama.logits(&units, &tokens).unwrap();
    let last = Golden::rows(&rows["attention_mask"]).into_iter().enumerate().map(|(row, mask)| {
        let n = mask.iter().filter(|&&real| real == 1).count();
        logits.i((row, n - 1)).unwrap()
    });
    let last = Tensor::stack(&last.collect::<Vec<_>>(), 0).unwrap();
    let difference = distance(&last, &golden.tensors["lora.last_logits.a"]);
    assert!(difference < 2e-5, "{what}: logits: {difference}");
}

/// Trains a model and returns the losses and norms, and a folder with the final adapters and the
/// merged model.
fn train(golden: &Golden) -> (Vec<(f64, f64)>, TempDir) {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let lora = Lora::open(golden.folder.join("adapter_start")).unwrap();
    let llama = golden.llama.clone().with_lora(lora.clone()).unwrap();
    let mut model = DataParallel::builder(&mesh, |vb| llama.declare(&vb))
        .by_units(llama.units())
        .weights(&golden.folder)
        .allow_missing(Lora::PATTERNS)
        .init_with(lora.values())
        .train_only(Lora::PATTERNS)
        .clip_grad_norm(1.)
        .uneven(Uneven::Balanced)
        .build(optimizer)
        .unwrap();
    let mut steps = Vec::new();
    for n in 0..STEPS {
        model.set_learning_rate(rate(n, STEPS)).unwrap();
        let step = model.step(batch(golden, n), loss(&llama)).unwrap();
        steps.push((step.loss, step.grad_norm));
    }
    let folder = tempfile::tempdir().unwrap();
    model.save_pretrained(folder.path().join("adapter"), lora.adapters()).unwrap();
    model.save_pretrained(folder.path().join("merged"), lora.merged()).unwrap();
    (steps, folder)
}
