//! The errors of operations, all detected before any computation.

use candle_core::{DType, DeviceLocation};

/// The result of an operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation was rejected.
///
/// `?` converts it to candle's error, so functions that return [`candle_core::Result`] can call
/// these operations.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An input has a different shape than the operation requires.
    #[error("{op}: {input} has the shape {found:?}, expected {expected}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The name of the input.
        input: &'static str,
        /// The shape of the input.
        found: Vec<usize>,
        /// The required shape, in words or numbers.
        expected: String,
    },
    /// An input has a type that the operation does not support.
    #[error("{op}: {input} has the type {}, expected {expected}", found.as_str())]
    DType {
        /// The operation.
        op: &'static str,
        /// The name of the input.
        input: &'static str,
        /// The type of the input.
        found: DType,
        /// The supported types, in words.
        expected: &'static str,
    },
    /// Two inputs are on different devices.
    #[error("{op}: the inputs lie on {first:?} and {other:?}")]
    Device {
        /// The operation.
        op: &'static str,
        /// The device of the first input.
        first: DeviceLocation,
        /// The device of the other input.
        other: DeviceLocation,
    },
    /// An input that the operation does not differentiate depends on a variable.
    #[error("{op}: {input} depends on a variable that would get no gradient; {cure}")]
    Gradient {
        /// The operation.
        op: &'static str,
        /// The name of the input.
        input: &'static str,
        /// The change that makes the call valid.
        cure: String,
    },
    /// An index or a number in the configuration is out of its range.
    #[error("{op}: {name} is {value}, it must be {expected}")]
    OutOfRange {
        /// The operation.
        op: &'static str,
        /// The name of the number.
        name: String,
        /// The number.
        value: String,
        /// The valid values, in words or numbers.
        expected: String,
    },
    /// candle returned an error.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// Returns the error of an input that must be detached.
    pub(crate) fn gradient(op: &'static str, input: &'static str) -> Self {
        Self::Gradient { op, input, cure: "detach it".to_owned() }
    }

    /// Returns the error of a number that is not as `expected`.
    pub(crate) fn out_of_range(
        op: &'static str,
        name: impl Into<String>,
        value: &impl ToString,
        expected: impl Into<String>,
    ) -> Self {
        let (name, value, expected) = (name.into(), value.to_string(), expected.into());
        Self::OutOfRange { op, name, value, expected }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => Self::wrap(error),
        }
    }
}
