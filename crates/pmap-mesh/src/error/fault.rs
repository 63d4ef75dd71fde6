//! Faults of specs: the ways in which a spec does not fit its tensor.

use std::fmt;

/// The message of a spec that does not fit its tensor.
#[derive(Debug)]
pub(crate) struct SpecFault(pub(crate) String);

impl SpecFault {
    /// There is neither one spec for all arguments (or results), nor one for each, nor one for each
    /// of their tensors.
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
        let tensor = side.noun();
        Self(format!("dimension {dim} is out of range for {tensor} {index} of shape {shape:?}"))
    }

    /// The dimension does not split evenly over the devices. If it has fewer rows than devices,
    /// [`Uneven::Balanced`](crate::Uneven::Balanced) cannot cut it either. `size` is the size of
    /// the dimension after its earlier cuts.
    pub(crate) fn not_divisible(
        (index, dim): (usize, usize),
        shape: &[usize],
        size: usize,
        parts: usize,
    ) -> Self {
        let dimension =
            format!("dimension {dim} of input {index} of shape {shape:?} has size {size}");
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

impl Side {
    /// Returns the word for a tensor of this side.
    pub(crate) fn noun(self) -> &'static str {
        match self {
            Self::In => "input",
            Self::Out => "output",
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::In => "in",
            Self::Out => "out",
        })
    }
}
