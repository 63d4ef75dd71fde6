//! The text part of models that also see images.

use std::{collections::BTreeMap, fs, path::Path};

use candle_core::{DType, Device, Tensor, safetensors};
use core_types::WorldSize;
use finetune::{
    Generation, Generator, Prompt, RunOptions, Start, TextSource, Trainer,
    cost::Sharding,
    models::{Decoder, DecoderConfig},
    run::open_generator,
    spec::Recipe,
};
use pmap_mesh::DeviceMesh;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::models::golden::Golden;

/// The golden models, and the architecture and type of folders with more parts.
const WRAPPED: [(&str, &str, &str); 2] = [
    ("gemma3", "Gemma3ForConditionalGeneration", "gemma3"),
    ("ministral3", "Mistral3ForConditionalGeneration", "mistral3"),
];

const PREFIX: &str = "language_model.";

type Tensors = BTreeMap<String, Tensor>;

/// Makes the folder of a model whose text part is the golden model.
fn wrap(golden: &Golden, architecture: &str, model_type: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden.folder.join(name), at(name)).unwrap();
    }
    let text = fs::read_to_string(golden.folder.join("config.json")).unwrap();
    let mut text: Value = serde_json::from_str(&text).unwrap();
    text.as_object_mut().unwrap().retain(|field, _| field != "architectures");
    // The model's fields decide.
    text["tie_word_embeddings"] = json!(false);
    text["dtype"] = json!("bfloat16");
    let config = json!({
        "architectures": [architecture], "model_type": model_type, "dtype": "float32",
        "tie_word_embeddings": true, "text_config": text, "vision_config": {"hidden_size": 8},
    });
    fs::write(at("config.json"), config.to_string()).unwrap();
    fs::write(at("preprocessor_config.json"), "{}").unwrap();
    let text = read(&golden.folder.join("model.safetensors")).into_iter();
    let text = text.map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor));
    save(text.chain(other_parts()), &at("model.safetensors"));
    folder
}

fn other_parts() -> [(String, Tensor); 2] {
    let numbers = Tensor::arange(0_f32, 6., &Device::Cpu).unwrap().affine(0.3, 0.1).unwrap();
    let half = numbers.reshape((2, 3)).unwrap().to_dtype(DType::BF16).unwrap();
    [
        ("vision_tower.encoder.layers.0.self_attn.q_proj.weight".to_owned(), half),
        ("multi_modal_projector.mm_input_projection_weight".to_owned(), numbers),
    ]
}

fn read(file: &Path) -> Tensors {
    safetensors::load(file, &Device::Cpu).unwrap().into_iter().collect()
}

fn save(tensors: impl Iterator<Item = (String, Tensor)>, file: &Path) {
    safetensors::save(&tensors.collect(), file).unwrap();
}

fn bytes(tensor: &Tensor) -> (DType, Vec<usize>, Vec<u8>) {
    let mut bytes = Vec::new();
    tensor.flatten_all().unwrap().write_bytes(&mut bytes).unwrap();
    (tensor.dtype(), tensor.dims().to_vec(), bytes)
}

/// Checks that two models generate the same text with the same logits, and returns its tokens.
fn same_tokens(models: [Generator; 2]) -> Vec<u32> {
    let mut options = Generation::default().with_max_tokens(16);
    options.ignore_end = true;
    let [(text, logits), other] = models.map(|model| {
        let text = model.generate(Prompt::Text("When the fog came in"), &options).unwrap();
        let logits = bytes(&model.logits(&text).unwrap());
        (text, logits)
    });
    assert!((&text, logits) == (&other.0, other.1), "{text:?} {:?}", other.0);
    text.ids
}

#[test]
fn text_parts_compute_like_text_models() {
    for (model, architecture, model_type) in WRAPPED {
        let golden = Golden::open(model);
        let folder = wrap(&golden, architecture, model_type);
        let config = fs::read_to_string(folder.path().join("config.json")).unwrap();
        let mut config = DecoderConfig::from_json(&config).unwrap();
        assert_eq!(config.name_prefix, PREFIX);
        config.name_prefix = "";
        assert_eq!(config, *golden.decoder.config());
        let open = |path, adapter: Option<&Path>| Generator::open(path, adapter).unwrap();
        let ids = same_tokens([open(folder.path(), None), open(&golden.folder, None)]);
        assert_eq!(json!(ids), golden.expected["generation"]["new"], "{model}");

        let adapter = golden.folder.join("adapter_final");
        let renamed = as_loaded(&adapter);
        let renamed = open(folder.path(), Some(renamed.path()));
        same_tokens([renamed, open(&golden.folder, Some(&adapter))]);
    }
}

/// Copies adapters, with the names that PEFT finds in a loaded model with several parts.
fn as_loaded(adapter: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    let loaded = |name: &str| name.replace("model.layers", "model.language_model.layers");
    let [config, matrices] = ["adapter_config.json", "adapter_model.safetensors"];
    let text = fs::read_to_string(adapter.join(config)).unwrap();
    fs::write(copy.path().join(config), loaded(&text)).unwrap();
    let renamed = read(&adapter.join(matrices)).into_iter();
    save(renamed.map(|(name, matrix)| (loaded(&name), matrix)), &copy.path().join(matrices));
    copy
}

#[test]
fn runs_keep_the_other_parts() {
    for (model, architecture, model_type) in WRAPPED {
        let golden = Golden::open(model);
        let folder = wrap(&golden, architecture, model_type);
        let [found, plain] = [folder.path(), &golden.folder].map(|path| train(path, None));
        let text = check_other_parts(found.path(), folder.path());
        let expected = read(&plain.path().join("run/model/model.safetensors"));
        assert_eq!(text.len(), expected.len());
        for (name, tensor) in expected {
            assert!(bytes(&text[&format!("{PREFIX}{name}")]) == bytes(&tensor), "{name}");
        }
        same_tokens(
            [found, plain].map(|home| open_generator(&home.path().join("run"), None).unwrap()),
        );

        let home = train(folder.path(), Some(2));
        check_other_parts(home.path(), folder.path());
        let run = home.path().join("run");
        check_names(&run.join("adapter"));
        let adapted = Generator::open(folder.path(), Some(&run.join("adapter"))).unwrap();
        same_tokens([open_generator(&run, None).unwrap(), adapted]);
    }
}

/// Checks that the model of a run has the other parts of the folder that it started from, and returns its
/// text part.
fn check_other_parts(home: &Path, folder: &Path) -> Tensors {
    let saved = home.join("run/model");
    let mut tensors = read(&saved.join("model.safetensors"));
    for (name, expected) in other_parts() {
        assert!(bytes(&tensors.remove(&name).unwrap()) == bytes(&expected), "{name}");
    }
    for name in ["config.json", "preprocessor_config.json"] {
        assert_eq!(fs::read(saved.join(name)).unwrap(), fs::read(folder.join(name)).unwrap());
    }
    tensors
}

/// Checks that adapters have the names of a loaded model, and that no target names a layer of another part.
fn check_names(adapter: &Path) {
    let matrices = read(&adapter.join("adapter_model.safetensors"));
    let config = fs::read_to_string(adapter.join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let targets = config["target_modules"].as_array().unwrap();
    assert_eq!(targets.len() * 2, matrices.len());
    for target in targets.iter().map(|target| target.as_str().unwrap()) {
        assert!(target.starts_with("model.language_model.layers."), "{target}");
        assert!(matrices.contains_key(&format!("base_model.model.{target}.lora_A.weight")));
    }
}

/// Trains three steps, of adapters if they have a rank, and returns the folder with the run.
fn train(model: &Path, lora: Option<usize>) -> TempDir {
    let home = tempfile::tempdir().unwrap();
    let data = home.path().join("texts.jsonl");
    fs::write(&data, "\"1 and 2\"\n\"2 and 3\"\n\"3 and 4\"\n\"4 and 5\"\n").unwrap();
    let options = RunOptions {
        model: Some(model.into()),
        data: vec![TextSource::new(&data)],
        out: Some(home.path().join("run")),
        steps: Some(3),
        batch_size: Some(4),
        merge: lora.is_some(),
        sharding: Some(Sharding::default()),
        recipe: Recipe { lr: Some(1e-2), lora, ..Recipe::default() },
        ..RunOptions::default()
    };
    let Start::Train(run) = options.prepare(WorldSize::new(2).unwrap()).unwrap() else {
        panic!("a new run is not complete");
    };
    for event in Trainer::new(&DeviceMesh::cpu(2).unwrap(), *run).unwrap() {
        event.unwrap();
    }
    home
}

#[test]
fn published_files_leave_out_defaults() {
    // As in the folder of Gemma 3 4B.
    let gemma = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    });
    let config = DecoderConfig::from_json(&gemma.to_string()).unwrap();
    let heads = [config.num_attention_heads, config.num_key_value_heads, config.head_dim];
    assert_eq!((heads, config.vocab_size, config.dtype), ([8, 4, 256], 262_208, DType::BF16));
    assert!(config.tie_word_embeddings);
    Decoder::from_config(config).unwrap();
    for (field, expected) in [
        ("quantization_config", "the weights are quantized"),
        ("text_config", "text_config.model_type is llama, it must be gemma3_text"),
    ] {
        let mut other = gemma.clone();
        other[field] = json!({"model_type": "llama"});
        let error = DecoderConfig::from_json(&other.to_string()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
