//! Numbers in JSON: a list, the output of `sample`, or a field of each line.

use std::{
    fmt,
    io::{BufRead, Read},
};

use candle_distributed::data::NpyNumber;
use serde::{
    Deserialize,
    de::{self, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::{NumberList, number::Number};
use crate::{
    error::{Error, Result},
    input,
};

/// Reads the numbers of a list, or the indices in the output of `sample`, all at once.
pub(super) fn read<T: Number>(list: &NumberList, source: impl Read) -> Result<Vec<T>> {
    let bytes = input::read_bytes(source, &list.path)?;
    let numbers = if bytes.first() == Some(&b'[') {
        serde_json::from_slice(&bytes)
    } else {
        serde_json::from_slice(&bytes).and_then(|answer: SampleOutput<T>| {
            match answer.format_version {
                1 => Ok(answer.indices),
                other => Err(de::Error::custom(format!("format_version is {other}, must be 1"))),
            }
        })
    };
    numbers
        .map_err(|fault| Error::json(&list.path, "a list of numbers", fault).with_hint(list.hint))
}

/// The output of `sample --format json`.
#[derive(Deserialize)]
struct SampleOutput<T> {
    format_version: u32,
    indices: Vec<T>,
}

/// The length limit of a line. A line of ten million token ids is shorter.
const MAX_LINE_BYTES: u64 = 1 << 26;

/// Reads a number from the field `name` of each line: the number itself, or the length of a list.
/// Blank lines are skipped.
pub(super) fn read_field_of_lines<T: Number>(
    list: NumberList,
    mut source: impl BufRead + 'static,
    name: String,
) -> impl Iterator<Item = Result<T>> {
    let mut line = Vec::new();
    let mut n_lines = 0_u64;
    std::iter::from_fn(move || {
        loop {
            line.clear();
            n_lines += 1;
            let outcome = source.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut line);
            match outcome {
                Err(fault) => return Some(Err(list.read_error(fault))),
                Ok(0) => return None,
                Ok(_) if line.trim_ascii().is_empty() => {}
                Ok(_) => return Some(number_in_line(&list, n_lines, &line, &name)),
            }
        }
    })
}

/// Reads the number in the field `name` of line `n`.
fn number_in_line<T: Number>(list: &NumberList, n: u64, line: &[u8], name: &str) -> Result<T> {
    let place = format!("line {n} of {}", list.name());
    if line.len() as u64 > MAX_LINE_BYTES {
        return Err(list.error(format!("{place} is longer than {MAX_LINE_BYTES} bytes")));
    }
    let mut json = serde_json::Deserializer::from_slice(line);
    let count =
        FieldReader(name).deserialize(&mut json).and_then(|count| json.end().map(|()| count));
    let number = count
        .map_err(|fault| fault.to_string())
        .and_then(|count| T::from_value(NpyNumber::Unsigned(count)));
    number.map_err(|fault| {
        let shown = input::excerpt(String::from_utf8_lossy(line).trim_end());
        list.error(format!("{place} has no {} in {name:?}: {fault}: {shown}", list.what))
    })
}

/// Reads the count in the field with this name, and skips all other fields.
struct FieldReader<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for FieldReader<'_> {
    type Value = u64;

    fn deserialize<D: de::Deserializer<'de>>(self, json: D) -> Result<u64, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldReader<'_> {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with a field {:?}", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<u64, A::Error> {
        let mut found = None;
        while let Some(key) = object.next_key::<String>()? {
            if key != self.0 {
                object.next_value::<IgnoredAny>()?;
            } else if found.replace(object.next_value::<FieldCount>()?.0).is_some() {
                return Err(de::Error::custom("the field appears twice"));
            }
        }
        found.ok_or_else(|| de::Error::custom("there is no such field"))
    }
}

/// A whole number, or the length of a list.
struct FieldCount(u64);

impl<'de> Deserialize<'de> for FieldCount {
    fn deserialize<D: de::Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_any(CountVisitor).map(Self)
    }
}

struct CountVisitor;

impl<'de> Visitor<'de> for CountVisitor {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number, or a list to be counted")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<u64, E> {
        Ok(number)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<u64, A::Error> {
        let mut n_items = 0;
        while items.next_element::<IgnoredAny>()?.is_some() {
            n_items += 1;
        }
        Ok(n_items)
    }
}
