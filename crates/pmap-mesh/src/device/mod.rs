//! Devices: how tensors are moved to devices, and the threads of candle's kernels.

pub(crate) mod threads;
pub(crate) mod to_device;
