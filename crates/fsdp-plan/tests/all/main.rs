//! Laws of every plan, and plans beside those of PyTorch, pinned and of bad input.

mod laws;
mod plans;
