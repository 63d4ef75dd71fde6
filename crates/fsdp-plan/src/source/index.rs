//! The index of a model that is spread over several safetensors files.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::{
    entries::{Entries, Entry, unique},
    parse,
};
use crate::{
    error::{Error, Result, SourceError},
    param::{ParameterInfo, names},
};

/// Reads the parameters of a model from its `model.safetensors.index.json`, given a way to `read` those of one of its
/// files; each is read once, in the order of their names.
///
/// # Errors
///
/// Those of `read`; [`SourceError::Malformed`];
/// [`ParameterError::DuplicateName`](crate::ParameterError::DuplicateName) if a tensor is listed twice;
/// [`SourceError::BadFileName`] if a file is not a plain name, since a downloaded index has no say over other folders;
/// [`SourceError::NotInIndex`] if a file has a tensor that
/// the index does not place there, and [`SourceError::NotInFile`] if it lacks one that the index
/// does.
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
    let mut places: BTreeMap<String, String> = entries(json)?.into_iter().collect();
    let mut parameters = Vec::new();
    let files: BTreeSet<String> = places.values().cloned().collect();
    for file in files {
        for info in read(&file)? {
            if places.remove(info.name()).as_ref() != Some(&file) {
                return Err(Error::Source(SourceError::NotInIndex {
                    tensor: info.name().into(),
                    file,
                })
                .into());
            }
            parameters.push(info);
        }
    }
    match places.pop_first() {
        Some((tensor, file)) => Err(Error::Source(SourceError::NotInFile { tensor, file }).into()),
        None => Ok(parameters),
    }
}

/// Every tensor with its file.
fn entries(json: &str) -> Result<Vec<(String, String)>> {
    let entries = parse::<Index>("safetensors index", json.as_bytes())?.weight_map.named?;
    unique(entries.len(), |position| (names::hash(&entries[position].0), &entries[position].0))?;
    match entries.iter().find(|(_, file)| !is_plain(file)) {
        Some((_, file)) => Err(Error::Source(SourceError::BadFileName { file: file.clone() })),
        None => Ok(entries),
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: Entries<String>,
}

/// The name of a file.
impl Entry for String {
    type Named = (Self, Self);

    fn named(self, name: String) -> Result<Self::Named> {
        Ok((name, self))
    }
}

/// Whether `file` names an entry of the index's own folder on every system.
fn is_plain(file: &str) -> bool {
    !matches!(file, "" | "." | "..") && !file.contains(['/', '\\', ':', '\0'])
}
