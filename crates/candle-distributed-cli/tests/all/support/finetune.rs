//! A small model that is fine-tuned, and texts for it.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::support::text;

/// A folder with a `config.json` and texts beside it.
pub(crate) struct Model(pub(crate) tempfile::TempDir);

impl Model {
    /// A model of bytes, and 16 texts, half of which have prompts.
    pub(crate) fn new() -> Self {
        let model = Self(tempfile::tempdir().unwrap());
        fs::create_dir(model.at("new")).unwrap();
        fs::write(model.at("new/config.json"), config().to_string()).unwrap();
        let line = |n: usize| match n % 2 {
            0 => json!({"prompt": format!("{n} and 1 is "), "completion": (n + 1).to_string()}),
            _ => json!({"text": format!("line {n} of {}", "a text ".repeat(n % 3))}),
        };
        for kind in [0, 1] {
            let lines = (0..16).filter(|n| n % 2 == kind).map(|n| line(n).to_string() + "\n");
            let name = format!("texts/{kind}.jsonl");
            fs::create_dir_all(model.at("texts")).unwrap();
            fs::write(model.at(&name), lines.collect::<String>()).unwrap();
        }
        model
    }

    /// A folder with texts that are lines of a file.
    pub(crate) fn of_lines() -> Self {
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

    /// The arguments of a run on the texts into the folder `out`, of the new model, unless `more` name
    /// others.
    pub(crate) fn arguments(&self, out: &str, more: &[&str]) -> Vec<String> {
        let (new, texts, out) = (self.path("new"), self.path("texts"), self.path(out));
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

    /// The values of a field in the lines of a file of a run.
    pub(crate) fn numbers(&self, file: &str, field: &str) -> Vec<f64> {
        let lines = fs::read_to_string(self.at(file)).unwrap();
        let number =
            |line: &str| serde_json::from_str::<Value>(line).unwrap()[field].as_f64().unwrap();
        lines.lines().map(number).collect()
    }

    pub(crate) fn losses(&self, run: &str) -> Vec<f64> {
        self.numbers(&format!("{run}/metrics.jsonl"), "loss")
    }
}

/// The sizes of the model.
pub(crate) fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 48, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 10000.0, "torch_dtype": "float32",
        "eos_token_id": 256, "initializer_range": 0.1,
    })
}

/// The files of a folder.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect()
}

/// The names and types of the tensors in a file.
pub(crate) fn tensors(file: &Path) -> BTreeMap<String, safetensors::Dtype> {
    let bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.tensors().into_iter().map(|(name, view)| (name, view.dtype())).collect()
}
