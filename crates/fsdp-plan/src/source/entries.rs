//! A JSON object whose order counts.

use std::{collections::BTreeMap, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};

use crate::{
    error::{Error, ParameterError, Result},
    param::{ParameterInfo, names::Names},
};

/// What stands behind a name.
pub(super) trait Entry {
    /// What it becomes together with its name.
    type Named;

    fn named(self, name: String) -> Result<Self::Named>;
}

/// The entries of a JSON object in the order of the text; or what is wrong with one of them.
///
/// An ordered map of `serde_json` would lose repeated names, and keeps the order only if a feature
/// of it is on.
pub(super) struct Entries<E: Entry> {
    pub(super) named: Result<Vec<E::Named>>,
    /// The entry `__metadata__`, which does not describe a tensor.
    pub(super) metadata: Option<Metadata>,
}

/// The entry `__metadata__` of a safetensors header.
///
/// Metadata that the format does not allow is kept apart instead of refused: a planner, which reads
/// tensors alone, has always accepted such files.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum Metadata {
    Texts(BTreeMap<String, String>),
    Other(IgnoredAny),
}

impl<'de, E: Entry + Deserialize<'de>> Deserialize<'de> for Entries<E> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor(PhantomData))
    }
}

struct EntriesVisitor<E>(PhantomData<E>);

impl<'de, E: Entry + Deserialize<'de>> Visitor<'de> for EntriesVisitor<E> {
    type Value = Entries<E>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with one entry per tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<E>, A::Error> {
        let mut entries = Ok(Vec::new());
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                let value = map.next_value()?;
                metadata =
                    Some(if metadata.is_none() { value } else { Metadata::Other(IgnoredAny) });
                continue;
            }
            // Named while its text is still in the cache; an error waits until all the text is
            // known to be JSON.
            let entry: E = map.next_value()?;
            if let Ok(so_far) = &mut entries {
                match entry.named(name) {
                    Ok(named) => so_far.push(named),
                    Err(error) => entries = Err(error),
                }
            }
        }
        Ok(Entries { named: entries, metadata })
    }
}

/// Checks that no name occurs twice among `len` names; `name` returns the one at a position, with
/// its hash.
pub(super) fn unique<'a>(len: usize, name: impl Fn(usize) -> (u64, &'a str)) -> Result<()> {
    match Names::new(len, &name) {
        Ok(_) => Ok(()),
        Err(position) => Err(Error::Parameters(ParameterError::DuplicateName {
            name: name(position).1.to_owned(),
        })),
    }
}

/// Checks that no parameter occurs twice.
pub(super) fn unique_parameters<'a>(
    len: usize,
    info: impl Fn(usize) -> &'a ParameterInfo,
) -> Result<()> {
    unique(len, |position| (info(position).name_hash(), info(position).name()))
}
