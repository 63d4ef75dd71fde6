//! The folder of a model: its weights in one safetensors file, or in several files with an index.

pub(crate) mod weights;
pub(crate) mod writer;

use std::cmp::Ordering;

/// The file name of weights in a single file, as in Hugging Face's libraries.
pub(crate) const ONE_FILE: &str = "model.safetensors";
/// The file name of the index of weights in several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Compares names component by component, numbers by value.
pub fn natural_order(left: &str, right: &str) -> Ordering {
    left.split('.').map(component_key).cmp(right.split('.').map(component_key))
}

/// Returns a key that orders numbers by value, before words.
fn component_key(component: &str) -> ((u8, u64), &str) {
    (component.parse().map_or((1, 0), |number| (0, number)), component)
}
