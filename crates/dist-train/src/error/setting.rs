//! Validation of numeric settings.

use crate::error::{Error, Result};

impl Error {
    /// Rejects negative numbers, infinity and NaN.
    pub(crate) fn check_at_least_zero(name: &'static str, value: f64) -> Result<()> {
        let expected = "a number of at least 0";
        Self::check_setting((0.0..f64::INFINITY).contains(&value), name, value, expected)
    }

    /// Rejects numbers outside `0.0..1.0`.
    pub(crate) fn check_fraction(name: &'static str, value: f64) -> Result<()> {
        Self::check_setting((0.0..1.0).contains(&value), name, value, "at least 0 and less than 1")
    }

    /// Rejects numbers that are not positive and finite.
    pub(crate) fn check_positive(name: &'static str, value: f64) -> Result<()> {
        Self::check_setting(value > 0.0 && value.is_finite(), name, value, "a positive number")
    }

    /// Returns an error unless the value is valid.
    pub(crate) fn check_setting(
        fits: bool,
        name: &'static str,
        value: f64,
        expected: &'static str,
    ) -> Result<()> {
        if fits { Ok(()) } else { Err(Self::Setting { name, value, expected }) }
    }
}
