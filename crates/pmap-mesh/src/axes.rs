//! Which axes of a mesh are meant.

use std::fmt;

/// Some of the axes of a mesh, by name, or [`ALL`] of them.
///
/// A set: whatever order they are named in, positions along several axes count in the order of the
/// mesh, the last axis fastest. Along none, as by `[]`, each replica is a group of its own: a sum
/// is its own value, and nothing is cut. That is what remains of a list of axes that a program
/// works out and finds empty; to mean the whole mesh, write `ALL`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshAxes(Option<Vec<String>>);

/// All axes of a mesh at once: its devices in one row.
pub const ALL: MeshAxes = MeshAxes(None);

impl MeshAxes {
    /// The names, or `None` for all.
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

/// Axes of one mesh, as a set of bits: bit n is axis n.
pub(crate) type AxisSet = u64;
