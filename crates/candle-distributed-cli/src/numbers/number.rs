//! Conversion of list entries, as text or bytes, to numbers.

use candle_distributed::data::NpyNumber;
use serde::de::DeserializeOwned;

/// A type of the numbers in a list.
pub(super) trait Number: DeserializeOwned + 'static {
    /// Whether numbers may have a fraction.
    const IS_REAL: bool;

    /// Parses `word`, or describes its fault for a message.
    fn parse(word: &str) -> Result<Self, String>;

    /// Converts a value, or describes its fault for a message.
    fn from_value(value: NpyNumber) -> Result<Self, String>;
}

const NOT_A_NUMBER: &str = "not a number";

macro_rules! whole_numbers {
    ($($int:ty)*) => {$(
        impl Number for $int {
            const IS_REAL: bool = false;

            fn parse(word: &str) -> Result<Self, String> {
                word.parse().map_err(|_| {
                    // If all characters are digits, only a large number fails to parse.
                    if !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit()) {
                        format!("above the limit of {}", Self::MAX)
                    } else {
                        String::from(NOT_A_NUMBER)
                    }
                })
            }

            fn from_value(value: NpyNumber) -> Result<Self, String> {
                let number = match value {
                    NpyNumber::Unsigned(number) => i128::from(number),
                    NpyNumber::Signed(number) => i128::from(number),
                    NpyNumber::Real(_) => return Err("not a whole number".into()),
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

    fn from_value(value: NpyNumber) -> Result<Self, String> {
        Ok(match value {
            NpyNumber::Unsigned(number) => number as Self,
            NpyNumber::Signed(number) => number as Self,
            NpyNumber::Real(number) => number,
        })
    }
}
