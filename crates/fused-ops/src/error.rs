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
    #[error("{op}: {input} gets no gradient, but depends on a variable; detach it")]
    Gradient {
        /// The operation.
        op: &'static str,
        /// The name of the input.
        input: &'static str,
    },
    /// A checkpointed function depends on a variable that is not listed, and so would get no
    /// gradient.
    #[error("{op}: the function reads a variable of shape {shape:?} that is not among `vars`")]
    Variable {
        /// The operation.
        op: &'static str,
        /// The shape of the variable.
        shape: Vec<usize>,
    },
    /// An index is out of range.
    #[error("{op}: index {index} at position {position} is not below {limit}")]
    Index {
        /// The operation.
        op: &'static str,
        /// The index.
        index: i64,
        /// The position of the index among all indices.
        position: usize,
        /// The number of rows or classes.
        limit: usize,
    },
    /// A number in the configuration is out of its range.
    #[error("{op}: {name} is {value}, it must be {expected}")]
    Setting {
        /// The operation.
        op: &'static str,
        /// The name of the setting.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The valid values, in words or numbers.
        expected: String,
    },
    /// candle returned an error.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => Self::wrap(error),
        }
    }
}
