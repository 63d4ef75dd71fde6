//! Infallible walks over trees of tensors.

use std::convert::Infallible;

use candle_core::Tensor;
use pmap_mesh::TensorTree;

/// Maps each tensor of a tree with `f`, in order, into a tree of the same form.
pub(crate) fn map<T: TensorTree>(tree: &T, mut f: impl FnMut(&Tensor) -> Tensor) -> T {
    let Ok(mapped) = tree.try_map(&mut |leaf: &Tensor| Ok::<_, Infallible>(f(leaf)));
    mapped
}

/// Calls `f` on each tensor in order and collects the results.
pub(crate) fn each<R>(tree: &impl TensorTree, mut f: impl FnMut(&Tensor) -> R) -> Vec<R> {
    let mut results = Vec::new();
    map(tree, |leaf| {
        results.push(f(leaf));
        leaf.clone()
    });
    results
}
