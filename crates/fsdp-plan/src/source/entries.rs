//! Ordered JSON objects.

use std::{collections::BTreeMap, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};

use crate::{
    error::{Error, Result},
    param::{ParameterInfo, name_index::NameIndex},
};

/// The value of a JSON entry.
pub(super) trait NamedEntry {
    /// The value together with its name.
    type Named;

    /// Combines the value with its name.
    fn into_named(self, name: String) -> Result<Self::Named>;
}

/// The entries of a JSON object in the order of the text, or the first error among them.
///
/// The ordered map of `serde_json` would drop duplicate names, and keeps the order only with an
/// optional feature.
pub(super) struct JsonEntries<E: NamedEntry> {
    pub(super) entries: Result<Vec<E::Named>>,
    /// The entry `__metadata__`, which is not a tensor.
    pub(super) metadata: Option<HeaderMetadata>,
}

/// The entry `__metadata__` of a safetensors header.
///
/// Metadata that the format forbids is kept as `Other` instead of rejected: planners read only
/// tensors, and have always accepted such files.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum HeaderMetadata {
    Texts(BTreeMap<String, String>),
    Other(IgnoredAny),
}

impl<'de, E: NamedEntry + Deserialize<'de>> Deserialize<'de> for JsonEntries<E> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(JsonEntriesVisitor(PhantomData))
    }
}

struct JsonEntriesVisitor<E>(PhantomData<E>);

impl<'de, E: NamedEntry + Deserialize<'de>> Visitor<'de> for JsonEntriesVisitor<E> {
    type Value = JsonEntries<E>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with one entry per tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonEntries<E>, A::Error> {
        let mut entries = Ok(Vec::new());
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                let value = map.next_value()?;
                metadata = Some(if metadata.is_none() {
                    value
                } else {
                    HeaderMetadata::Other(IgnoredAny)
                });
                continue;
            }
            // Combine each entry with its name while the text is cached. Report an error only after the whole text
            // parsed as JSON.
            let entry: E = map.next_value()?;
            if let Ok(list) = &mut entries {
                match entry.into_named(name) {
                    Ok(named) => list.push(named),
                    Err(error) => entries = Err(error),
                }
            }
        }
        Ok(JsonEntries { entries, metadata })
    }
}

/// Checks that `len` names are distinct; `name` returns the name at a position with its hash.
pub(super) fn check_unique<'a>(len: usize, name: impl Fn(usize) -> (u64, &'a str)) -> Result<()> {
    match NameIndex::new(len, &name) {
        Ok(_) => Ok(()),
        Err(position) => Err(Error::listed_twice(name(position).1)),
    }
}

/// Checks that the names of parameters are distinct.
pub(super) fn check_unique_parameters<'a>(
    len: usize,
    info: impl Fn(usize) -> &'a ParameterInfo,
) -> Result<()> {
    check_unique(len, |position| (info(position).name_hash(), info(position).name()))
}
