//! Environment variables, and the numbers in them.

use std::ffi::OsString;

use super::error::{Error, Result};
use crate::rank::{Rank, WorldSize};

pub(super) const WHOLE_NUMBER: &str = "a whole number of at most 64 bits";

/// Variables, read by name.
pub(super) struct Vars<'a>(pub(super) &'a dyn Fn(&str) -> Option<OsString>);

impl Vars<'_> {
    /// The value of variable `name`.
    pub(super) fn text(&self, name: &'static str) -> Result<Option<String>> {
        match (self.0)(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text)),
            Some(Err(value)) => Err(Error::VariableNotUnicode { name, value }),
        }
    }

    /// The value of variable `name`, which must be a number if there is one.
    pub(super) fn number(&self, name: &'static str) -> Result<Option<Number>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        match parse(&text) {
            Some(value) => Ok(Some(Number { name, value })),
            None => Err(Error::VariableUnreadable { name, value: text, expected: WHOLE_NUMBER }),
        }
    }
}

/// A number and the variable it stands in.
#[derive(Clone, Copy)]
pub(super) struct Number {
    pub(super) name: &'static str,
    pub(super) value: u64,
}

impl Number {
    /// The size of a world, or of a part of one, of at most `max` ranks.
    pub(super) fn size(self, max: WorldSize) -> Result<WorldSize> {
        match WorldSize::new(self.value) {
            Ok(size) if size <= max => Ok(size),
            _ => Err(Error::SizeVariableOutOfRange { name: self.name, value: self.value, max }),
        }
    }

    /// The rank of this number; `size` must have been read as one by [`Number::size`].
    pub(super) fn rank_below(self, size: Self) -> Result<Rank> {
        if self.value < size.value {
            return Ok(Rank::in_world(self.value));
        }
        Err(Error::RankVariableOutOfRange {
            name: self.name,
            rank: self.value,
            size_name: size.name,
            size: size.value,
        })
    }
}

/// The number that consists of digits alone. Rust would also read `+3`, which no launcher writes.
pub(super) fn parse(text: &str) -> Option<u64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}
