//! The JSON of a run's state, checked so that the state is read as it was written.
//!
//! JSON has no infinities and no NaN. `serde_json` would write them as `null`, and reading `null`
//! fails, or gives `None` for an `Option`. So this module rejects infinities and NaN before
//! writing.

use serde::ser::{Error as _, Serialize};
use serde_json::{Error, Result, Value, value::RawValue};

/// Converts a state to JSON.
///
/// # Errors
///
/// Returns an error for a number that JSON does not have, and the errors of
/// [`serde_json::to_value`].
pub(super) fn to_value(state: &impl Serialize) -> Result<Value> {
    check_finite(state)?;
    serde_json::to_value(state)
}

/// Converts a state to text, indented as `serde_json` would indent it within an object.
///
/// Unlike a [`Value`], the text keeps the order of the fields.
///
/// # Errors
///
/// The errors of [`to_value`].
pub(super) fn to_raw(state: &impl Serialize) -> Result<Box<RawValue>> {
    check_finite(state)?;
    let text = serde_json::to_string_pretty(state)?;
    // Strings contain no line breaks, because JSON escapes them.
    RawValue::from_string(text.replace('\n', "\n  "))
}

/// Rejects infinities and NaN. CBOR has them, so they are still in a state's CBOR value.
fn check_finite(state: &impl Serialize) -> Result<()> {
    let value = ciborium::Value::serialized(state).map_err(Error::custom)?;
    match first_non_finite(&value) {
        None => Ok(()),
        Some(number) => {
            let reason = format!("the state has the number {number}, which JSON does not have");
            Err(Error::custom(reason))
        }
    }
}

fn first_non_finite(value: &ciborium::Value) -> Option<f64> {
    match value {
        ciborium::Value::Float(number) => Some(*number).filter(|number| !number.is_finite()),
        ciborium::Value::Tag(_, tagged) => first_non_finite(tagged),
        ciborium::Value::Array(items) => items.iter().find_map(first_non_finite),
        ciborium::Value::Map(entries) => entries
            .iter()
            .find_map(|(key, item)| first_non_finite(key).or_else(|| first_non_finite(item))),
        _ => None,
    }
}
