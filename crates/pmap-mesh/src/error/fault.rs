//! What can be wrong with a spec.

use std::fmt;

use candle_core::DType;

/// Why a spec does not fit a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpecFault {
    /// The number of specs fits neither the arguments nor the tensors.
    Count {
        /// Argument or result.
        side: Side,
        /// The number of specs given.
        specs: usize,
        /// The number of arguments or results: the elements of a tuple.
        arguments: usize,
        /// The number of tensors in them.
        tensors: usize,
    },
    /// The mesh has no such axis.
    Axes {
        /// Argument or result.
        side: Side,
        /// Which of its tensors.
        index: usize,
        /// What is wrong with the axes.
        reason: String,
    },
    /// An axis of the mesh is used for two things.
    AxisTwice {
        /// Argument or result.
        side: Side,
        /// Which of its tensors.
        index: usize,
        /// The axes as they were given the second time.
        axes: String,
    },
    /// An argument is to be summed, averaged or stacked.
    ReducedInput {
        /// Which input.
        index: usize,
    },
    /// A tensor has no such dimension.
    DimOutOfRange {
        /// Argument or result.
        side: Side,
        /// Which of its tensors.
        index: usize,
        /// The dimension that was asked for, negative ones count from the end.
        dim: isize,
        /// The shape it was asked of.
        shape: Vec<usize>,
    },
    /// The devices cannot get equal shards, or with [`Uneven::Balanced`](crate::Uneven::Balanced)
    /// not all of them one.
    NotDivisible {
        /// Which input.
        index: usize,
        /// The dimension to cut.
        dim: usize,
        /// Its size; of a dimension that is cut again, the size after the cut before.
        size: usize,
        /// The shape of the input.
        shape: Vec<usize>,
        /// The number of shards.
        parts: usize,
    },
    /// A dimension is cut a second time whose first cut made shards of different sizes, with
    /// [`Uneven::Balanced`](crate::Uneven::Balanced).
    CutAfterUneven {
        /// Which input.
        index: usize,
        /// The dimension to cut.
        dim: usize,
        /// Its size before the uneven cut.
        size: usize,
        /// The shape of the input.
        shape: Vec<usize>,
        /// The number of shards of the uneven cut.
        parts: usize,
    },
    /// A mean of integers would have to be rounded.
    MeanOfIntegers {
        /// Which output.
        index: usize,
        /// Its type.
        dtype: DType,
    },
    /// A kept tensor has another size than the result.
    KeptSize {
        /// Which output.
        index: usize,
        /// The dimension in which they differ.
        dim: usize,
        /// The size of the result.
        size: usize,
        /// The shape of the kept tensor.
        shape: Vec<usize>,
    },
}

impl fmt::Display for SpecFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count { side, specs, arguments, tensors } => write!(
                f,
                "{side}_axes has {specs} specs for {arguments} arguments of {tensors} tensors; give one, or one for each"
            ),
            Self::Axes { side, index, reason } => write!(f, "{side}put {index}: {reason}"),
            Self::AxisTwice { side, index, axes } => {
                write!(f, "{side}put {index}: a mesh axis of {axes} is named twice")
            }
            Self::ReducedInput { index } => {
                write!(f, "input {index}: an argument can be sharded or replicated, nothing else")
            }
            Self::DimOutOfRange { side, index, dim, shape } => {
                write!(
                    f,
                    "dimension {dim} is out of range for {side}put {index} of shape {shape:?}"
                )
            }
            Self::NotDivisible { index, dim, size, shape, parts } => {
                let below = size - size % parts;
                let above = below.saturating_add(*parts);
                write!(
                    f,
                    "dimension {dim} of input {index} of shape {shape:?} has size {size}, which does not split evenly over \
                     {parts} devices; {below} and {above} do, and `uneven` allows others"
                )
            }
            Self::CutAfterUneven { index, dim, size, shape, parts } => write!(
                f,
                "dimension {dim} of input {index} of shape {shape:?} is cut a second time, but its first cut of size \
                 {size} over {parts} devices is uneven; cut it along all axes at once, as `P::shard({dim}, [\"a\", \"b\"])`"
            ),
            Self::MeanOfIntegers { index, dtype } => {
                write!(
                    f,
                    "output {index} of type {} has no mean, only floats have; sum it",
                    dtype.as_str()
                )
            }
            Self::KeptSize { index, dim, size, shape } => write!(
                f,
                "output {index} has size {size} in dimension {dim}, the tensor kept for it has shape {shape:?}"
            ),
        }
    }
}

/// Whether a spec is one of an argument or of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Side {
    /// `in_axes`, arguments.
    In,
    /// `out_axes`, results.
    Out,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::In => "in",
            Self::Out => "out",
        })
    }
}
