//! The errors of a parameter, in a model, a plan or a checkpoint.

use std::path::PathBuf;

use candle_core::DType;
use core_types::human::Printable;

use crate::error::listed::Bracketed;

/// A mismatch between parameters and the model, the plan or the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParameterError {
    /// The plan or the model has no parameter or unit of this name.
    #[error("there is no parameter or unit named {name}", name = Printable(name))]
    Unknown {
        /// The requested name, or the name in a checkpoint.
        name: String,
    },
    /// A parameter of the plan or the model is not among the given ones.
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
        /// The kind of the items: `model`, or a name of the optimizer.
        kind: String,
        /// The first item that is missing, in row-major order.
        item: usize,
    },
    /// The shape of a parameter is wrong.
    #[error(
        "parameter {name} has shape {found:?}, expected {expected:?}",
        name = Printable(name)
    )]
    Shape {
        /// The parameter.
        name: String,
        /// The given shape, or the shape in the checkpoint.
        found: Vec<usize>,
        /// The shape in the model or plan.
        expected: Vec<usize>,
    },
    /// The dtype of a parameter is wrong.
    #[error("parameter {name} has dtype {found}, expected {expected}", name = Printable(name))]
    Dtype {
        /// The parameter.
        name: String,
        /// The given dtype.
        found: &'static str,
        /// The dtype in the plan or the model.
        expected: &'static str,
    },
    /// The names of pretrained weights and of the model differ, beyond the allowed names.
    #[error(
        "{}: {} of {n_parameters} parameters are missing{}, {} of {n_tensors} tensors are not the \
         model's{}",
        Printable(path.display()), missing.len(), Bracketed(missing), unexpected.len(), Bracketed(unexpected)
    )]
    Weights {
        /// The file or index.
        path: PathBuf,
        /// The parameters that the weights lack, in the order of the model.
        missing: Vec<String>,
        /// The number of the model's parameters.
        n_parameters: usize,
        /// The tensors that the model lacks, sorted.
        unexpected: Vec<String>,
        /// The number of tensors.
        n_tensors: usize,
    },
    /// The dtype of a pretrained weight cannot be converted to the parameter's.
    #[error(
        "parameter {name} has dtype {expected}, but {found} in the file cannot be converted to it",
        name = Printable(name)
    )]
    Conversion {
        /// The parameter.
        name: String,
        /// The dtype in the file.
        found: &'static str,
        /// The dtype in the model.
        expected: &'static str,
    },
    /// The planner and candle do not both support the dtype of a parameter.
    #[error("parameter {name} has unsupported dtype {dtype}", name = Printable(name))]
    UnknownDtype {
        /// The parameter.
        name: String,
        /// The dtype.
        dtype: String,
    },
}

impl ParameterError {
    /// Checks the shape of a parameter.
    pub(crate) fn check_shape(name: &str, found: &[usize], expected: &[usize]) -> Result<(), Self> {
        if found == expected {
            return Ok(());
        }
        Err(Self::Shape {
            name: name.to_owned(),
            found: found.to_vec(),
            expected: expected.to_vec(),
        })
    }

    /// Checks the dtype of a parameter.
    pub(crate) fn check_dtype(name: &str, found: DType, expected: DType) -> Result<(), Self> {
        if found == expected {
            return Ok(());
        }
        let (found, expected) = (found.as_str(), expected.as_str());
        Err(Self::Dtype { name: name.to_owned(), found, expected })
    }
}
