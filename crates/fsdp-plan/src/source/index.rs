//! The index of a model that is spread over several safetensors files.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::{
    entries::{Entries, unique},
    parse,
};
use crate::{Error, Result};

/// Lists the files that a `model.safetensors.index.json` names, each once, sorted.
///
/// They lie beside the index. The parameters of the model are those of all their headers, one file after the other.
///
/// # Errors
///
/// [`Error::Malformed`], [`Error::DuplicateName`] if a tensor is listed twice, or [`Error::BadFileName`] if a file is
/// not a plain name: a downloaded index has no say over other folders.
///
/// # Examples
///
/// ```
/// let json = r#"{"weight_map": {"b": "model-2.safetensors", "a": "model-1.safetensors", "c": "model-2.safetensors"}}"#;
/// assert_eq!(fsdp_plan::source::index_files(json)?, ["model-1.safetensors", "model-2.safetensors"]);
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
pub fn index_files(json: &str) -> Result<Vec<String>> {
    let Entries(entries) = parse::<Index>("safetensors index", json.as_bytes())?.weight_map;
    unique(entries.iter().map(|(name, _)| name.as_str()))?;
    let files: BTreeSet<String> = entries.into_iter().map(|(_, file)| file).collect();
    match files.iter().find(|file| !is_plain(file)) {
        Some(file) => Err(Error::BadFileName { file: file.clone() }),
        None => Ok(files.into_iter().collect()),
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: Entries<String>,
}

/// Whether `file` names an entry of the index's own folder on every system.
fn is_plain(file: &str) -> bool {
    !matches!(file, "" | "." | "..") && !file.contains(['/', '\\', ':', '\0'])
}
