//! The JSON of a run's state, checked so that the state is read as it was written.
//!
//! JSON has no infinities and no NaN. `serde_json` would write them as `null`, and reading `null`
//! fails, or gives `None` for an `Option`. So this module rejects infinities and NaN before
//! writing.

use serde::ser::{
    Error as _, Serialize, SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant,
    SerializeTuple, SerializeTupleStruct, SerializeTupleVariant, Serializer,
};
use serde_json::{Error, Result, Value, value::RawValue};

/// Converts a state to JSON.
///
/// # Errors
///
/// Returns an error for a number that JSON does not have, and the errors of
/// [`serde_json::to_value`].
pub(super) fn to_value(state: &impl Serialize) -> Result<Value> {
    state.serialize(AllFinite)?;
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
    state.serialize(AllFinite)?;
    let text = serde_json::to_string_pretty(state)?;
    // Strings contain no line breaks, because JSON escapes them.
    RawValue::from_string(text.replace('\n', "\n  "))
}

/// A serializer that checks all numbers and writes nothing.
#[derive(Clone, Copy)]
struct AllFinite;

impl AllFinite {
    fn check(number: f64) -> Result<()> {
        if number.is_finite() {
            return Ok(());
        }
        Err(Error::custom(format!("the state has the number {number}, which JSON does not have")))
    }
}

/// Implements the methods for values that are not floats and have no parts.
macro_rules! accept {
    ($($method:ident: $type:ty),* $(,)?) => {
        $(fn $method(self, _: $type) -> Result<()> {
            Ok(())
        })*
    };
}

/// Implements a trait for values with parts, and checks every part.
macro_rules! check_parts {
    ($($trait:ident: $method:ident($($key:ty)?)),* $(,)?) => {
        $(impl $trait for AllFinite {
            type Ok = ();
            type Error = Error;

            fn $method<T: Serialize + ?Sized>(&mut self, $(_: $key,)? part: &T) -> Result<()> {
                part.serialize(Self)
            }

            fn end(self) -> Result<()> {
                Ok(())
            }
        })*
    };
}

check_parts! {
    SerializeSeq: serialize_element(),
    SerializeTuple: serialize_element(),
    SerializeTupleStruct: serialize_field(),
    SerializeTupleVariant: serialize_field(),
    SerializeStruct: serialize_field(&'static str),
    SerializeStructVariant: serialize_field(&'static str),
}

impl SerializeMap for AllFinite {
    type Ok = ();
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<()> {
        key.serialize(Self)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        value.serialize(Self)
    }

    fn end(self) -> Result<()> {
        Ok(())
    }
}

impl Serializer for AllFinite {
    type Ok = ();
    type Error = Error;
    type SerializeSeq = Self;
    type SerializeTuple = Self;
    type SerializeTupleStruct = Self;
    type SerializeTupleVariant = Self;
    type SerializeMap = Self;
    type SerializeStruct = Self;
    type SerializeStructVariant = Self;

    accept! {
        serialize_bool: bool,
        serialize_i8: i8,
        serialize_i16: i16,
        serialize_i32: i32,
        serialize_i64: i64,
        serialize_i128: i128,
        serialize_u8: u8,
        serialize_u16: u16,
        serialize_u32: u32,
        serialize_u64: u64,
        serialize_u128: u128,
        serialize_char: char,
        serialize_str: &str,
        serialize_bytes: &[u8],
        serialize_unit_struct: &'static str,
    }

    fn serialize_f32(self, number: f32) -> Result<()> {
        Self::check(number.into())
    }

    fn serialize_f64(self, number: f64) -> Result<()> {
        Self::check(number)
    }

    fn serialize_none(self) -> Result<()> {
        Ok(())
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<()> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<()> {
        Ok(())
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, _: &'static str) -> Result<()> {
        Ok(())
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<()> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        value: &T,
    ) -> Result<()> {
        value.serialize(self)
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Self> {
        Ok(self)
    }

    fn serialize_tuple(self, _: usize) -> Result<Self> {
        Ok(self)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Self> {
        Ok(self)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self> {
        Ok(self)
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Self> {
        Ok(self)
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Self> {
        Ok(self)
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self> {
        Ok(self)
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
