//! Faults of specs: the ways in which a spec does not fit its tensor.

use std::fmt;

use candle_core::DType;

/// A spec that does not fit its tensor.
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
        /// The number of tensors in these arguments or results.
        tensors: usize,
    },
    /// The mesh has no such axis.
    Axes {
        /// The side of the tensor.
        side: Side,
        /// The index of the tensor on its side.
        index: usize,
        /// The error in the axes.
        reason: String,
    },
    /// A spec names an axis of the mesh twice.
    DuplicateAxis {
        /// The side of the tensor.
        side: Side,
        /// The index of the tensor on its side.
        index: usize,
        /// The axes of the second mention.
        axes: String,
    },
    /// An argument has a spec that only results may have: a sum, a mean or a stack.
    ReducedInput {
        /// The index of the input.
        index: usize,
    },
    /// A tensor has no such dimension.
    DimOutOfRange {
        /// The side of the tensor.
        side: Side,
        /// The index of the tensor on its side.
        index: usize,
        /// The requested dimension; a negative one counts from the end.
        dim: isize,
        /// The shape of the tensor.
        shape: Vec<usize>,
    },
    /// The devices cannot get shards of equal size; with
    /// [`Uneven::Balanced`](crate::Uneven::Balanced), there are fewer rows than devices.
    NotDivisible {
        /// The index of the input.
        index: usize,
        /// The dimension to cut.
        dim: usize,
        /// The size of the dimension, after earlier cuts of this dimension.
        size: usize,
        /// The shape of the input.
        shape: Vec<usize>,
        /// The number of shards.
        parts: usize,
    },
    /// A dimension is cut again after a cut into shards of different sizes, with
    /// [`Uneven::Balanced`](crate::Uneven::Balanced).
    CutAfterUneven {
        /// The index of the input.
        index: usize,
        /// The dimension to cut.
        dim: usize,
        /// The size of the dimension before the uneven cut.
        size: usize,
        /// The shape of the input.
        shape: Vec<usize>,
        /// The number of shards of the uneven cut.
        parts: usize,
    },
    /// A mean of integers would need rounding.
    MeanOfIntegers {
        /// The index of the output.
        index: usize,
        /// The dtype of the output.
        dtype: DType,
    },
    /// A result does not fill the tensor that the caller of
    /// [`PMap::call_into`](crate::PMap::call_into) passed for it.
    OutputSize {
        /// The index of the output.
        index: usize,
        /// The dimension in which the sizes differ.
        dim: usize,
        /// The size of the result.
        size: usize,
        /// The shape of the caller's tensor.
        shape: Vec<usize>,
    },
}

impl fmt::Display for SpecFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count { side, specs, arguments, tensors } => {
                let part = match side {
                    Side::In => "argument",
                    Side::Out => "result",
                };
                write!(
                    f,
                    "{side}_axes has {specs} specs for {arguments} {part}s of {tensors} tensors; give one spec, one for \
                     each {part}, or one for each tensor"
                )
            }
            Self::Axes { side, index, reason } => write!(f, "{side}put {index}: {reason}"),
            Self::DuplicateAxis { side, index, axes } => {
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
            // `Uneven::Balanced` does not allow such a size either.
            Self::NotDivisible { index, dim, size, shape, parts } if size < parts => write!(
                f,
                "dimension {dim} of input {index} of shape {shape:?} has size {size}, which is too small for {parts} \
                 devices; use a size of at least {parts}, or `Uneven::Pad`"
            ),
            Self::NotDivisible { index, dim, size, shape, parts } => {
                let smaller = size - size % parts;
                let larger = smaller.saturating_add(*parts);
                write!(
                    f,
                    "dimension {dim} of input {index} of shape {shape:?} has size {size}, which does not split evenly over \
                     {parts} devices; {smaller} and {larger} do, and `uneven` allows others"
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
            Self::OutputSize { index, dim, size, shape } => write!(
                f,
                "output {index} has size {size} in dimension {dim}, but the tensor passed for it has shape {shape:?}"
            ),
        }
    }
}

/// The side of a parallel function that a spec belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Side {
    /// Arguments, by `in_axes`.
    In,
    /// Results, by `out_axes`.
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
