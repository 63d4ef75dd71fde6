//! Sets of mesh axes, by name.

use std::fmt;

/// A set of the axes of a mesh, by name, or [`ALL`] of them.
///
/// The order of the names does not matter: positions along several axes count in the order of the
/// mesh, the last axis fastest. An empty set, such as `[]`, makes every replica a group of one: a
/// sum returns its own value, and nothing is cut. A program that computes a list of axes and finds
/// none gets this; to name the whole mesh, use `ALL`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshAxes(Option<Vec<String>>);

/// All axes of a mesh, as one row of devices.
pub const ALL: MeshAxes = MeshAxes(None);

impl MeshAxes {
    /// Returns the names, or `None` for all axes.
    pub(crate) fn names(&self) -> Option<&[String]> {
        self.0.as_deref()
    }
}

impl From<&str> for MeshAxes {
    fn from(name: &str) -> Self {
        Self(Some(vec![name.to_owned()]))
    }
}

impl<const N: usize> From<[&str; N]> for MeshAxes {
    fn from(names: [&str; N]) -> Self {
        Self(Some(names.map(str::to_owned).into()))
    }
}

impl FromIterator<String> for MeshAxes {
    fn from_iter<I: IntoIterator<Item = String>>(names: I) -> Self {
        Self(Some(names.into_iter().collect()))
    }
}

impl From<&MeshAxes> for MeshAxes {
    fn from(axes: &MeshAxes) -> Self {
        axes.clone()
    }
}

impl fmt::Display for MeshAxes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("all axes"),
            Some(names) => f.write_str(&names.join("+")),
        }
    }
}

/// Axes of one mesh as a set of bits: bit n is axis n.
pub(crate) type AxisSet = u64;
