//! What a replica knows of itself.

use candle_core::Device;

/// The running copy of a parallel function on one device.
#[derive(Clone, Debug)]
pub struct Replica {
    pub(crate) index: usize,
    pub(crate) count: usize,
    pub(crate) device: Device,
}

impl Replica {
    /// The replica's place in the mesh, from 0; JAX's `axis_index`.
    #[doc(alias = "axis_index")]
    pub fn index(&self) -> usize {
        self.index
    }

    /// The number of replicas that run this call; JAX's `axis_size`.
    #[doc(alias = "axis_size")]
    pub fn count(&self) -> usize {
        self.count
    }

    /// The device that holds the replica's inputs; new tensors belong on it too.
    pub fn device(&self) -> &Device {
        &self.device
    }
}
