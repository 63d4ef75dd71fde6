//! Devices: how tensors are moved to devices, the threads of candle's kernels, and the memory of tensors.

pub(crate) mod allocator;
pub(crate) mod threads;
pub(crate) mod to_device;
