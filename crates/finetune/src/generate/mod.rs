//! Text from a model: one token after the other, each by the logits of all tokens before it.
//!
//! Keys and values of earlier tokens are not cached but computed again for each token. So the
//! tokens are by definition the same as in training, and n of them take as long as n forward passes.

mod choose;
pub(crate) mod generator;
pub(crate) mod options;
pub(crate) mod prompt;
mod weights;
