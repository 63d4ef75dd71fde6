//! Environment variables, and the numbers in them.

use std::ffi::OsString;

use super::error::{Error, Result};
use crate::rank::{Rank, WorldSize};

pub(super) const WHOLE_NUMBER: &str = "a whole number of at most 64 bits";

/// Environment variables, looked up by name.
pub(super) struct LaunchVars<'a>(pub(super) &'a dyn Fn(&str) -> Option<OsString>);

impl LaunchVars<'_> {
    /// Returns the value of variable `name`.
    pub(super) fn text(&self, name: &'static str) -> Result<Option<String>> {
        match (self.0)(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text)),
            Some(Err(value)) => Err(invalid(name, value, "Unicode")),
        }
    }

    /// Returns the value of variable `name`, which must be a number if set.
    pub(super) fn number(&self, name: &'static str) -> Result<Option<NamedNumber>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        match parse(&text) {
            Some(value) => Ok(Some(NamedNumber { name, value })),
            None => Err(invalid(name, text, WHOLE_NUMBER)),
        }
    }
}

/// A number with the name of its variable.
#[derive(Clone, Copy)]
pub(super) struct NamedNumber {
    pub(super) name: &'static str,
    pub(super) value: u64,
}

impl NamedNumber {
    /// Converts to a world size or a local size of at most `max` ranks.
    pub(super) fn to_world_size(self, max: WorldSize) -> Result<WorldSize> {
        match WorldSize::new(self.value) {
            Ok(size) if size <= max => Ok(size),
            _ => Err(self.out_of_range(format!("from 1 to {max}"))),
        }
    }

    /// Converts to a rank less than `size`, which
    /// [`to_world_size`](NamedNumber::to_world_size) must have checked.
    pub(super) fn to_rank(self, size: Self) -> Result<Rank> {
        if self.value < size.value {
            return Ok(Rank::in_world(self.value));
        }
        Err(self.out_of_range(format!("below {}, which is {}", size.name, size.value)))
    }

    fn out_of_range(self, expected: String) -> Error {
        invalid(self.name, self.value.to_string(), expected)
    }
}

/// Returns the error of a variable that is not as `expected`.
pub(super) fn invalid(
    name: &'static str,
    value: impl Into<OsString>,
    expected: impl Into<String>,
) -> Error {
    Error::VariableInvalid { name, value: value.into(), expected: expected.into() }
}

/// Parses a number without a sign. Rust would also accept `+3`, which no launcher writes.
pub(super) fn parse(text: &str) -> Option<u64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}
