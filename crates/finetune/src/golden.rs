//! Golden model folders of the tests, with outputs of the Python package transformers.

use std::{fs, path::PathBuf};

use serde_json::Value;

use crate::folder::Folder;

/// Models of the Llama family.
pub(crate) const MODELS: [&str; 4] = ["llama", "llama3", "qwen2", "mistral"];

/// Models of other families.
pub(crate) const FAMILIES: [&str; 17] = [
    "gemma2",
    "gemma3",
    "glm4",
    "gpt_oss",
    "granite",
    "llama_bias",
    "ministral3",
    "mistral_window",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "phi3_longrope",
    "qwen2_yarn",
    "qwen3",
    "qwen3_moe",
    "smollm3",
];

pub(crate) fn path(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(model)
}

pub(crate) fn folder(model: &str) -> Folder {
    Folder::open(&path(model)).unwrap()
}

/// Reads a JSON file of the folder.
pub(crate) fn json(model: &str, name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(path(model).join(name)).unwrap()).unwrap()
}

/// Reads conversations and their texts, as rendered by transformers.
pub(crate) fn chat() -> Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/chat.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Copies the folder, and changes one of its JSON files.
pub(crate) fn changed(
    model: &str,
    name: &str,
    change: impl FnOnce(&mut Value),
) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(path(model)).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            continue;
        }
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let mut value = json(model, name);
    change(&mut value);
    fs::write(copy.path().join(name), value.to_string()).unwrap();
    copy
}
