//! Properties of every sampler, and comparisons with the index lists of PyTorch and SPDL.

mod laws;
mod order_laws;
mod spdl_golden;
mod torch_golden;
