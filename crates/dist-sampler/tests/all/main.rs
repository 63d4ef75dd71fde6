//! Laws of every sampler, and the index lists of PyTorch and SPDL.

mod laws;
mod spdl_golden;
mod torch_golden;
