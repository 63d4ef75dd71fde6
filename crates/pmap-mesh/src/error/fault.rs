//! Faults of specs: the ways in which a spec does not fit its tensor.

use std::fmt;

/// The message of a spec that does not fit its tensor.
#[derive(Debug)]
pub(crate) struct SpecFault(pub(crate) String);

impl SpecFault {
    /// The number of specs fits neither the arguments or results, nor their tensors.
    pub(crate) fn count(side: Side, specs: usize, arguments: usize, tensors: usize) -> Self {
        let part = match side {
            Side::In => "argument",
            Side::Out => "result",
        };
        Self(format!(
            "{side}_axes has {specs} specs for {arguments} {part}s of {tensors} tensors; give one spec, one for each \
             {part}, or one for each tensor"
        ))
    }

    /// A tensor has no such dimension.
    pub(crate) fn out_of_range(side: Side, index: usize, dim: isize, shape: &[usize]) -> Self {
        Self(format!("dimension {dim} is out of range for {side}put {index} of shape {shape:?}"))
    }

    /// The devices cannot get shards of equal size; with
    /// [`Uneven::Balanced`](crate::Uneven::Balanced), there are fewer rows than devices. `size` is
    /// the size of the dimension after its earlier cuts.
    pub(crate) fn not_divisible(
        (index, dim): (usize, usize),
        shape: &[usize],
        size: usize,
        parts: usize,
    ) -> Self {
        let dimension =
            format!("dimension {dim} of input {index} of shape {shape:?} has size {size}");
        // `Uneven::Balanced` does not allow such a size either.
        if size < parts {
            return Self(format!(
                "{dimension}, which is too small for {parts} devices; use a size of at least {parts}, or `Uneven::Pad`"
            ));
        }
        let smaller = size - size % parts;
        let larger = smaller.saturating_add(parts);
        Self(format!(
            "{dimension}, which does not split evenly over {parts} devices; {smaller} and {larger} do, and `uneven` \
             allows others"
        ))
    }
}

/// The side of a parallel function that a spec belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
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
