//! Along which axis tensors are cut and put together again.

use crate::error::{Error, Result};

/// What each device gets of an input; JAX's `in_axes`, where `None` is [`InAxis::Replicate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InAxis {
    /// An equal part along this axis; negative axes count from the last.
    Shard(isize),
    /// The whole.
    Replicate,
}

/// What becomes of the outputs of all devices; JAX's `out_axes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OutAxis {
    /// They are concatenated along this axis, in the order of the mesh; negative axes count from the last.
    Gather(isize),
    /// They are added up, in the order of the mesh whichever device finishes first (`psum`).
    Sum,
    /// They are averaged, in the order of the mesh (`pmean`); floats only.
    Mean,
}

/// One axis for each tensor, or one for all.
///
/// Made from a single axis, an array or a vector of axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axes<A>(Kind<A>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind<A> {
    /// The first tensor gets one, the others another.
    FirstAndRest(A, A),
    Each(Vec<A>),
}

impl<A: Copy> Axes<A> {
    pub(crate) fn first_and_rest(first: A, rest: A) -> Self {
        Self(Kind::FirstAndRest(first, rest))
    }

    /// The axis of each of `tensors` tensors; `side` says whose they are if their number is wrong.
    pub(crate) fn resolve(&self, tensors: usize, side: &'static str) -> Result<Vec<A>> {
        match &self.0 {
            Kind::FirstAndRest(first, rest) => {
                Ok((0..tensors).map(|index| if index == 0 { *first } else { *rest }).collect())
            }
            Kind::Each(axes) if axes.len() == tensors => Ok(axes.clone()),
            Kind::Each(axes) => Err(Error::AxesCount { side, axes: axes.len(), tensors }),
        }
    }
}

impl<A: Copy> From<A> for Axes<A> {
    fn from(axis: A) -> Self {
        Self::first_and_rest(axis, axis)
    }
}

impl<A, const N: usize> From<[A; N]> for Axes<A> {
    fn from(axes: [A; N]) -> Self {
        Self(Kind::Each(axes.into()))
    }
}

impl<A> From<Vec<A>> for Axes<A> {
    fn from(axes: Vec<A>) -> Self {
        Self(Kind::Each(axes))
    }
}

/// The position of `axis` among `rank` dimensions, or `None` if there is no such axis.
pub(crate) fn normalize(axis: isize, rank: usize) -> Option<usize> {
    let position = if axis < 0 { rank.checked_sub(axis.unsigned_abs())? } else { axis.unsigned_abs() };
    (position < rank).then_some(position)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_axes_count_from_the_end() {
        assert_eq!([-2, -1, 0, 1].map(|axis| normalize(axis, 2)), [Some(0), Some(1), Some(0), Some(1)]);
        assert_eq!([-3, 2, isize::MIN, isize::MAX].map(|axis| normalize(axis, 2)), [None; 4]);
        assert_eq!([0, -1].map(|axis| normalize(axis, 0)), [None; 2]);
    }
}
