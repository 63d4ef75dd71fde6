//! The index of a model stored in several safetensors files.

use std::collections::{BTreeMap, BTreeSet};

use core_types::human::Printable;
use serde::Deserialize;

use super::{
    entries::{JsonEntries, NamedEntry, check_unique},
    parse,
};
use crate::{
    error::{Error, Result, SourceError},
    param::{ParameterInfo, name_index},
};

/// Reads the parameters of a model from its `model.safetensors.index.json`. `read` returns the parameters of one file;
/// it is called once per file, in the order of file names.
///
/// # Errors
///
/// - The errors of `read`;
/// - [`SourceError::Malformed`];
/// - [`Error::InvalidParameter`] if a tensor is listed twice;
/// - [`SourceError::Index`] if a file is not a plain name, since a downloaded index must not reach other folders, if a
///   file has a tensor that the index does not list for it, or if it lacks one that the index lists.
///
/// # Examples
///
/// ```
/// use fsdp_plan::{ElemType, Error, ParameterInfo, source};
///
/// let json = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
/// let read = |file: &str| {
///     let name = if file == "model-1.safetensors" { "a" } else { "b" };
///     Ok::<_, Error>(vec![ParameterInfo::new(name, [2], ElemType::F32)?])
/// };
/// assert_eq!(source::from_index(json, read)?.len(), 2);
/// # Ok::<(), Error>(())
/// ```
pub fn from_index<E: From<Error>>(
    json: &str,
    mut read: impl FnMut(&str) -> Result<Vec<ParameterInfo>, E>,
) -> Result<Vec<ParameterInfo>, E> {
    let mut unread: BTreeMap<String, String> = parse_entries(json)?.into_iter().collect();
    let mut parameters = Vec::new();
    let files: BTreeSet<String> = unread.values().cloned().collect();
    for file in files {
        for info in read(&file)? {
            if unread.remove(info.name()).as_ref() != Some(&file) {
                let reason = format!(
                    "{} has tensor {}, which the index does not list for this file",
                    Printable(&file),
                    Printable(info.name())
                );
                return Err(Error::Source(SourceError::Index { reason }).into());
            }
            parameters.push(info);
        }
    }
    match unread.pop_first() {
        Some((tensor, file)) => {
            let [tensor, file] = [&tensor, &file].map(Printable);
            let reason = format!("the index lists tensor {tensor} for {file}, which lacks it");
            Err(Error::Source(SourceError::Index { reason }).into())
        }
        None => Ok(parameters),
    }
}

/// Returns every tensor with its file.
fn parse_entries(json: &str) -> Result<Vec<(String, String)>> {
    let entries = parse::<IndexFile>("safetensors index", json.as_bytes())?.weight_map.entries?;
    let name = |position: usize| entries[position].0.as_str();
    check_unique(entries.len(), |position| (name_index::hash(name(position)), name(position)))?;
    match entries.iter().find(|(_, file)| !is_plain(file)) {
        Some((_, file)) => {
            let reason = format!("the index names file {file:?}, which is not a plain file name");
            Err(Error::Source(SourceError::Index { reason }))
        }
        None => Ok(entries),
    }
}

#[derive(Deserialize)]
struct IndexFile {
    weight_map: JsonEntries<String>,
}

/// A file name.
impl NamedEntry for String {
    type Named = (Self, Self);

    fn into_named(self, name: String) -> Result<Self::Named> {
        Ok((name, self))
    }
}

/// Returns true if `file` names an entry of the index's folder on every operating system.
fn is_plain(file: &str) -> bool {
    !matches!(file, "" | "." | "..") && !file.contains(['/', '\\', ':', '\0'])
}
