//! One replica's call of a collective.

use std::{fmt, panic::Location};

use candle_core::DType;

use crate::axes::{AxisSet, MeshAxes};

/// One replica's call of a collective: the parameters that must agree over a group, and the source
/// location.
///
/// Operation, axes, dtype and shape must be equal on all replicas of a group. The location may
/// differ: a branch by rank may call the same collective from two places.
#[derive(Clone, Debug)]
pub(crate) struct CollectiveCall {
    /// The name of the operation.
    pub(crate) op: &'static str,
    /// The parameters of the operation that must agree, such as a dimension or a root; empty if it
    /// has none.
    pub(crate) detail: String,
    /// The axes as a set.
    pub(crate) axis_set: AxisSet,
    /// The axes as the caller named them.
    pub(crate) axes: MeshAxes,
    pub(crate) dtype: Option<DType>,
    pub(crate) shape: Vec<usize>,
    /// The dimension in which sizes may differ.
    pub(crate) free_dim: Option<usize>,
    pub(crate) location: &'static Location<'static>,
}

impl CollectiveCall {
    /// Returns true if all parameters that must agree are equal.
    pub(crate) fn agrees_with(&self, other: &Self) -> bool {
        self.op == other.op
            && self.detail == other.detail
            && self.dtype == other.dtype
            && self.axis_set == other.axis_set
            && self.free_dim == other.free_dim
            && self.shape.len() == other.shape.len()
            && self.sizes().eq(other.sizes())
    }

    /// Returns the sizes in all dimensions but the free one, which must agree.
    fn sizes(&self) -> impl Iterator<Item = usize> {
        let free_dim = self.free_dim;
        self.shape
            .iter()
            .enumerate()
            .filter(move |(dim, _)| Some(*dim) != free_dim)
            .map(|(_, size)| *size)
    }
}

impl fmt::Display for CollectiveCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, detail, axes, dtype, shape, location, .. } = self;
        write!(f, "{op}{detail}")?;
        if let Some(dtype) = dtype {
            write!(f, " of {} {shape:?}", dtype.as_str())?;
        }
        write!(f, " over {axes} at {location}")
    }
}
