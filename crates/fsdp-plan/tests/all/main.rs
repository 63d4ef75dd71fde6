//! Laws of plans, comparison with PyTorch, snapshots, and invalid input.

mod laws;
mod plans;
