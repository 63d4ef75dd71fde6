//! A JSON object whose order counts.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};

use crate::{Error, ParameterInfo, Result, names::Names};

/// The entries of a JSON object in the order of the text, but for `__metadata__`.
///
/// An ordered map of `serde_json` would lose repeated names, and keeps the order only if a feature of it is on.
pub(super) struct Entries<T>(pub(super) Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Entries<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor(PhantomData))
    }
}

struct EntriesVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for EntriesVisitor<T> {
    type Value = Entries<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with one entry per tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<T>, A::Error> {
        let mut entries = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else {
                entries.push((name, map.next_value()?));
            }
        }
        Ok(Entries(entries))
    }
}

/// Checks that no name occurs twice among `len`, of which `name` gives each with its hash.
pub(super) fn unique<'a>(len: usize, name: impl Fn(usize) -> (u64, &'a str)) -> Result<()> {
    match Names::new(len, &name) {
        Ok(_) => Ok(()),
        Err(position) => Err(Error::DuplicateName { name: name(position).1.to_owned() }),
    }
}

/// Checks that no parameter occurs twice.
pub(super) fn unique_parameters<'a>(len: usize, info: impl Fn(usize) -> &'a ParameterInfo) -> Result<()> {
    unique(len, |position| (info(position).name_hash(), info(position).name()))
}
