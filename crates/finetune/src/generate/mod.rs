//! Text generation, token by token.
//!
//! Keys and values of earlier tokens are not cached but recomputed for each token. Generation
//! therefore uses the same computation as training, and n tokens take n forward passes.

mod choose;
pub(crate) mod generator;
pub(crate) mod options;
pub(crate) mod prompt;
mod weights;
