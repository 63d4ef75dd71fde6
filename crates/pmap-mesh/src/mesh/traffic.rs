//! Counts of the bytes that a mesh's collectives have sent.

use crate::{
    engine::traffic::{Traffic, TrafficCounter},
    mesh::DeviceMesh,
};

#[doc(hidden)]
impl DeviceMesh {
    /// Returns the bytes that each slot of this process has contributed to collectives since the
    /// mesh was built, by slot.
    ///
    /// The counts are exact between two calls, and partial while a call runs. A collective is
    /// counted when it begins, whether it succeeds or not.
    pub fn traffic(&self) -> Vec<Traffic> {
        self.backend().counters().iter().map(TrafficCounter::read).collect()
    }
}
