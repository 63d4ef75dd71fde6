//! A number in a list, as a word or as bytes.

use std::fmt;

use serde::de::DeserializeOwned;

/// A number as bytes have it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Real(f64),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsigned(number) => number.fmt(f),
            Self::Signed(number) => number.fmt(f),
            Self::Real(number) => number.fmt(f),
        }
    }
}

/// A number in a list.
pub(super) trait Number: DeserializeOwned + 'static {
    /// Whether it may have a fraction.
    const IS_REAL: bool;

    /// The number that `word` is, or what is wrong with it.
    fn parse(word: &str) -> Result<Self, String>;

    /// The number that a value is, or what is wrong with it.
    fn of(value: Value) -> Result<Self, String>;
}

const NOT_A_NUMBER: &str = "not a number";

macro_rules! whole_numbers {
    ($($int:ty)*) => {$(
        impl Number for $int {
            const IS_REAL: bool = false;

            fn parse(word: &str) -> Result<Self, String> {
                let is_digits = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
                word.parse().map_err(|_| {
                    if is_digits {
                        format!("above the limit of {}", Self::MAX)
                    } else {
                        String::from(NOT_A_NUMBER)
                    }
                })
            }

            fn of(value: Value) -> Result<Self, String> {
                let number = match value {
                    Value::Unsigned(number) => i128::from(number),
                    Value::Signed(number) => i128::from(number),
                    Value::Real(_) => return Err("not a whole number".into()),
                };
                if number < 0 {
                    return Err("negative".into());
                }
                Self::try_from(number).map_err(|_| format!("above the limit of {}", Self::MAX))
            }
        }
    )*};
}

whole_numbers!(u32 u64);

impl Number for f64 {
    const IS_REAL: bool = true;

    fn parse(word: &str) -> Result<Self, String> {
        word.parse().map_err(|_| String::from(NOT_A_NUMBER))
    }

    fn of(value: Value) -> Result<Self, String> {
        Ok(match value {
            Value::Unsigned(number) => number as Self,
            Value::Signed(number) => number as Self,
            Value::Real(number) => number,
        })
    }
}
