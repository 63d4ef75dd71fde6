//! What a mesh tells of the collectives on it.

use crate::{
    engine::traffic::{Counter, Traffic},
    mesh::DeviceMesh,
};

#[doc(hidden)]
impl DeviceMesh {
    /// What each slot of this process has handed over in collectives since the mesh was made, in
    /// the order of the slots.
    ///
    /// Exact between two calls; while one runs, what it has counted by then. A collective counts
    /// when it begins, whether it succeeds or not.
    pub fn traffic(&self) -> Vec<Traffic> {
        self.backend().counters().iter().map(Counter::read).collect()
    }
}
