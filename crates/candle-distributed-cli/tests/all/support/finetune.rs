//! A small model to fine-tune, and texts for it.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::support::text;

/// A temporary folder with a model configuration, texts, and runs.
pub(crate) struct ModelHome(pub(crate) tempfile::TempDir);

impl ModelHome {
    /// Creates a folder with a byte model and 16 texts, half of them with prompts.
    pub(crate) fn new() -> Self {
        let model = Self(tempfile::tempdir().unwrap());
        fs::create_dir(model.at("new")).unwrap();
        fs::write(model.at("new/config.json"), config().to_string()).unwrap();
        for kind in [0, 1] {
            let lines = (0..16).filter(|n| n % 2 == kind).map(|n| example(n).to_string() + "\n");
            let name = format!("texts/{kind}.jsonl");
            fs::create_dir_all(model.at("texts")).unwrap();
            fs::write(model.at(&name), lines.collect::<String>()).unwrap();
        }
        model
    }

    /// Creates a folder with a text file of lines, and without a model.
    pub(crate) fn with_lines() -> Self {
        let home = Self(tempfile::tempdir().unwrap());
        fs::create_dir(home.at("texts")).unwrap();
        let lines: Vec<String> = (1..=40).map(|n| format!("Line {n} of a text.\n\n")).collect();
        fs::write(home.at("texts/lines.txt"), lines.concat()).unwrap();
        home
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.at(name).to_str().unwrap().into()
    }

    /// Returns the arguments of a run into the folder `out`, with the new model and the texts
    /// unless `more` names others.
    pub(crate) fn arguments(&self, out: &str, more: &[&str]) -> Vec<String> {
        let new = self.path("new");
        let texts = self.path("texts");
        let out = self.path(out);
        let mut arguments = vec!["train", "--out", &out];
        if !more.contains(&"--data") {
            arguments.extend(["--data", &texts]);
        }
        if !more.contains(&"--model") {
            arguments.extend(["--model", &new]);
        }
        if !more.iter().any(|option| ["--max-tokens", "--batch-size"].contains(option)) {
            arguments.extend(["--max-tokens", "96"]);
        }
        arguments.extend(["--checkpoint-every", "4"]);
        if more.contains(&"--validation") && !more.contains(&"--validate-every") {
            arguments.extend(["--validate-every", "4"]);
        }
        arguments.extend(more);
        arguments.into_iter().map(str::to_owned).collect()
    }

    /// Trains into the folder `out`.
    pub(crate) fn train(&self, out: &str, more: &[&str]) {
        let arguments = self.arguments(out, more);
        text(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    }

    /// Returns the values of a field in the lines of a file.
    pub(crate) fn numbers(&self, file: &str, field: &str) -> Vec<f64> {
        let lines = fs::read_to_string(self.at(file)).unwrap();
        let mut numbers = Vec::new();
        for line in lines.lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            numbers.push(line[field].as_f64().unwrap());
        }
        numbers
    }

    pub(crate) fn losses(&self, run: &str) -> Vec<f64> {
        self.numbers(&format!("{run}/metrics.jsonl"), "loss")
    }
}

/// Returns example `n` of the texts.
fn example(n: usize) -> Value {
    match n % 2 {
        0 => json!({"prompt": format!("{n} and 1 is "), "completion": (n + 1).to_string()}),
        _ => json!({"text": format!("line {n} of {}", "a text ".repeat(n % 3))}),
    }
}

/// Returns the configuration of the model.
pub(crate) fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 48, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 10000.0, "torch_dtype": "float32",
        "eos_token_id": 256, "initializer_range": 0.1,
    })
}

/// Reads the files of a folder.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect()
}

/// Returns the names and types of the tensors in a file.
pub(crate) fn tensors(file: &Path) -> BTreeMap<String, safetensors::Dtype> {
    let bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.tensors().into_iter().map(|(name, view)| (name, view.dtype())).collect()
}
