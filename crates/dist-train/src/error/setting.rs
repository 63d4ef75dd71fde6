//! Numbers that a setting cannot be.

/// A setting of an optimizer, of clipping or of a check is a number with which every result would be
/// wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {value}, it must be {expected}")]
#[non_exhaustive]
pub struct SettingError {
    /// The setting, in words.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// What it may be, in words.
    pub expected: &'static str,
}

impl SettingError {
    /// Refuses negative numbers, infinity and NaN.
    pub(crate) fn check_at_least_zero(name: &'static str, value: f64) -> Result<(), Self> {
        let expected = "a number of at least 0";
        if (0.0..f64::INFINITY).contains(&value) {
            Ok(())
        } else {
            Err(Self { name, value, expected })
        }
    }

    /// Refuses all but numbers of at least 0 and less than 1.
    pub(crate) fn check_fraction(name: &'static str, value: f64) -> Result<(), Self> {
        let expected = "at least 0 and less than 1";
        if (0.0..1.0).contains(&value) { Ok(()) } else { Err(Self { name, value, expected }) }
    }

    /// Refuses all but positive numbers.
    pub(crate) fn check_positive(name: &'static str, value: f64) -> Result<(), Self> {
        let expected = "a positive number";
        if value > 0.0 && value.is_finite() { Ok(()) } else { Err(Self { name, value, expected }) }
    }
}

impl From<SettingError> for candle_core::Error {
    /// For optimizers, which return candle's errors.
    fn from(error: SettingError) -> Self {
        Self::wrap(error)
    }
}
