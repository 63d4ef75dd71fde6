//! Laws of plans, comparison with PyTorch, snapshots, and invalid input.

mod hostile;
mod laws;
mod plans;
