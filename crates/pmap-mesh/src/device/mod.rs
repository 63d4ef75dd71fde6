//! Devices: moving tensors to them, and the threads of their kernels.

pub(crate) mod threads;
pub(crate) mod to_device;
