//! Fine-tuning of adapters, and the saved files.

use std::{collections::BTreeMap, path::Path};

use candle_core::{Device, IndexOp, Tensor, Var, safetensors};
use dist_train::{DataParallel, Lora};
use finetune::models::Tokens;
use pmap_mesh::{DeviceMesh, Uneven};
use tempfile::TempDir;

use crate::models::{
    golden::{FAMILIES, Golden, MODELS, distance, ids},
    training::{STEPS, assert_near, batch, loss, optimizer, rate},
};

/// Models whose adapters include those of experts, which are rejected.
const WITH_EXPERT_ADAPTERS: [&str; 2] = ["mixtral", "qwen3_moe"];

#[test]
fn adapters_learn_like_peft() {
    for model in MODELS.into_iter().chain(FAMILIES) {
        let golden = Golden::open(model);
        if WITH_EXPERT_ADAPTERS.contains(&model) {
            let error = Lora::open(golden.folder.join("adapter_start")).unwrap_err().to_string();
            assert!(error.contains("alpha_pattern is"), "{error}");
            continue;
        }
        let (steps, saved) = train(&golden);
        check(&golden, &steps, saved.path(), model);
    }
}

#[test]
fn unknown_layers_get_no_adapters() {
    let golden = Golden::open("llama");
    let mesh = DeviceMesh::cpu(1).unwrap();
    let lora = Lora::new(["q_proj", "query"], 4, 8.).unwrap();
    let decoder = golden.decoder.clone().with_lora(lora).unwrap();
    let builder = DataParallel::builder(&mesh, |vb| decoder.declare(&vb)).by_units(decoder.units());
    let rejected = builder.weights(&golden.folder).build(optimizer).unwrap_err().to_string();
    assert!(rejected.contains("query"), "{rejected}");
}

/// A merged adapter of a tied weight would change the embedding too.
#[test]
fn embeddings_and_experts_get_no_adapters() {
    let tied = "share its weight (tie_word_embeddings)";
    for (model, target, expected) in [
        ("llama", "embed_tokens", "it is an embedding"),
        ("qwen2", "embed_tokens", tied),
        ("qwen2", "model.embed_tokens", tied),
        ("qwen2", "lm_head", tied),
        ("qwen3_moe", "down_proj", "experts and routers cannot"),
        ("mixtral", "gate", "experts and routers cannot"),
    ] {
        let lora = Lora::new(["q_proj", target], 4, 8.).unwrap();
        let rejected = Golden::open(model).decoder.with_lora(lora).unwrap_err().to_string();
        assert!(rejected.contains(target) && rejected.contains(expected), "{rejected}");
    }
    let head = Lora::new(["lm_head"], 4, 8.).unwrap();
    assert!(Golden::open("llama").decoder.with_lora(head).is_ok());
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
    let rows_of_ids = Golden::rows(&rows["input_ids"]);
    let decoder = golden.decoder_for(rows_of_ids[0].len());
    let logits = decoder.logits(&units, &Tokens::rows(ids(&rows_of_ids))).unwrap();
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
    let decoder = golden.decoder.clone().with_lora(lora.clone()).unwrap();
    let mut model = DataParallel::builder(&mesh, |vb| decoder.declare(&vb))
        .by_units(decoder.units())
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
        let step = model.step(batch(golden, n), loss(&decoder)).unwrap();
        steps.push((step.loss, step.grad_norm));
    }
    let folder = tempfile::tempdir().unwrap();
    model.save_pretrained(folder.path().join("adapter"), lora.adapters()).unwrap();
    model.save_pretrained(folder.path().join("merged"), lora.merged()).unwrap();
    (steps, folder)
}
