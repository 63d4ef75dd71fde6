//! Text generation, token by token.
//!
//! Keys and values of earlier tokens are cached, so each token takes one pass for itself alone. The
//! logits are those of the forward pass of training within rounding.

mod choose;
pub(crate) mod generator;
pub(crate) mod options;
pub(crate) mod prompt;
mod weights;
