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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Serialize;

    use super::*;

    #[derive(Serialize)]
    struct Named {
        unit: (),
        value: Variant,
    }

    #[derive(Serialize)]
    enum Variant {
        Unit,
        New(Option<f64>),
        Tuple(u8, f32),
        Struct { values: Vec<f64> },
    }

    #[test]
    fn non_json_numbers_are_rejected() {
        let named = |value| BTreeMap::from([("key", Named { unit: (), value })]);
        for good in [
            Variant::Unit,
            Variant::New(None),
            Variant::New(Some(-0.0)),
            Variant::Tuple(1, f32::MAX),
            Variant::Struct { values: vec![] },
        ] {
            to_value(&named(good)).unwrap();
        }
        for bad in [
            Variant::New(Some(f64::INFINITY)),
            Variant::Tuple(1, f32::NAN),
            Variant::Struct { values: vec![0.0, f64::NEG_INFINITY] },
        ] {
            let error = to_value(&named(bad)).unwrap_err().to_string();
            assert!(error.ends_with("which JSON does not have"), "{error}");
        }
    }
}
