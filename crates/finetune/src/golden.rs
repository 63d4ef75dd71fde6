//! Golden model folders of the tests, with outputs of the Python package transformers.

use std::{fs, path::PathBuf};

use serde_json::Value;

pub(crate) use self::names::{FAMILIES, MODELS};
use crate::folder::Folder;

/// The names are shared with the tests of the public interface.
#[path = "../tests/golden/models.rs"]
mod names;

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
