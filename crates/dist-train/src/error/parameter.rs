//! What can be wrong with a parameter, whether in a model, a plan or a checkpoint.

/// Why the parameters that are there are not those that were expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParameterError {
    /// The plan or the model has no parameter or unit of this name.
    #[error("there is no parameter or unit named {name}")]
    Unknown {
        /// The name that was asked for, or that a checkpoint has.
        name: String,
    },
    /// The plan or the model has a parameter that is not among those that are given.
    #[error("parameter {name} is missing")]
    Missing {
        /// The parameter.
        name: String,
    },
    /// A checkpoint has only some items of a parameter, or of its optimizer's state.
    #[error("parameter {name} is incomplete: item {item} of its {kind} is missing")]
    Incomplete {
        /// The parameter.
        name: String,
        /// What the items are: `model`, or what the optimizer calls them.
        kind: String,
        /// The first item that is missing, in row-major order.
        item: usize,
    },
    /// A parameter has another shape than it should.
    #[error("parameter {name} has the shape {found:?}, {expected:?} was expected")]
    Shape {
        /// The parameter.
        name: String,
        /// The shape of what was given, or of what the checkpoint has.
        found: Vec<usize>,
        /// The shape in the model or plan.
        expected: Vec<usize>,
    },
    /// The items of a parameter are of another type than the plan says.
    #[error("parameter {name} is of {found}, the plan says {expected}")]
    Dtype {
        /// The parameter.
        name: String,
        /// The type of what was given.
        found: &'static str,
        /// The type in the plan.
        expected: &'static str,
    },
    /// The planner and candle do not both know the type of a parameter's items.
    #[error("parameter {name} is of {dtype}, which variables cannot be")]
    UnknownDtype {
        /// The parameter.
        name: String,
        /// The type.
        dtype: String,
    },
}

impl ParameterError {
    /// Refuses a parameter that has another shape than it should.
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
}
