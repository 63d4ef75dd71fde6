//! What can be wrong with a parameter, whether in a model, a plan or a checkpoint.

use std::path::PathBuf;

use candle_core::DType;
use core_types::human::Printable;

use crate::error::listed::Bracketed;

/// Why the parameters that are there are not those that were expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParameterError {
    /// The plan or the model has no parameter or unit of this name.
    #[error("there is no parameter or unit named {name}", name = Printable(name))]
    Unknown {
        /// The name that was asked for, or that a checkpoint has.
        name: String,
    },
    /// The plan or the model has a parameter that is not among those that are given.
    #[error("parameter {name} is missing", name = Printable(name))]
    Missing {
        /// The parameter.
        name: String,
    },
    /// A checkpoint has only some items of a parameter, or of its optimizer's state.
    #[error(
        "parameter {} is incomplete: item {item} of its {} is missing",
        Printable(name),
        Printable(kind)
    )]
    Incomplete {
        /// The parameter.
        name: String,
        /// What the items are: `model`, or what the optimizer calls them.
        kind: String,
        /// The first item that is missing, in row-major order.
        item: usize,
    },
    /// A parameter has another shape than it should.
    #[error(
        "parameter {name} has the shape {found:?}, {expected:?} was expected",
        name = Printable(name)
    )]
    Shape {
        /// The parameter.
        name: String,
        /// The shape of what was given, or of what the checkpoint has.
        found: Vec<usize>,
        /// The shape in the model or plan.
        expected: Vec<usize>,
    },
    /// The items of a parameter are of another type than the plan or the model says.
    #[error("parameter {name} is of {found}, {expected} was expected", name = Printable(name))]
    Dtype {
        /// The parameter.
        name: String,
        /// The type of what was given.
        found: &'static str,
        /// The type in the plan or the model.
        expected: &'static str,
    },
    /// Pretrained weights have other names than the model, and not those that may differ.
    #[error(
        "{}: {} of {n_parameters} parameters are missing{}, {} of {n_tensors} tensors are not the \
         model's{}",
        Printable(path.display()), missing.len(), Bracketed(missing), unexpected.len(), Bracketed(unexpected)
    )]
    Weights {
        /// The file or index.
        path: PathBuf,
        /// The parameters that the weights lack, in the order in which the model declares them.
        missing: Vec<String>,
        /// How many parameters the model has.
        n_parameters: usize,
        /// The tensors that the model lacks, sorted.
        unexpected: Vec<String>,
        /// How many tensors there are.
        n_tensors: usize,
    },
    /// Pretrained weights have a parameter in a type that cannot be converted to its own.
    #[error(
        "parameter {name} is of {expected}, and {found} in the file is not converted to it",
        name = Printable(name)
    )]
    Conversion {
        /// The parameter.
        name: String,
        /// The type in the file.
        found: &'static str,
        /// The type in the model.
        expected: &'static str,
    },
    /// The planner and candle do not both know the type of a parameter's items.
    #[error("parameter {name} is of {dtype}, which variables cannot be", name = Printable(name))]
    UnknownDtype {
        /// The parameter.
        name: String,
        /// The type.
        dtype: String,
    },
}

impl ParameterError {
    /// Checks the shape of a parameter.
    #[doc(hidden)]
    pub fn check_shape(name: &str, found: &[usize], expected: &[usize]) -> Result<(), Self> {
        if found == expected {
            return Ok(());
        }
        Err(Self::Shape {
            name: name.to_owned(),
            found: found.to_vec(),
            expected: expected.to_vec(),
        })
    }

    /// Checks the type of a parameter.
    pub(crate) fn check_dtype(name: &str, found: DType, expected: DType) -> Result<(), Self> {
        if found == expected {
            return Ok(());
        }
        let (found, expected) = (found.as_str(), expected.as_str());
        Err(Self::Dtype { name: name.to_owned(), found, expected })
    }
}
