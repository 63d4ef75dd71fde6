//! Walks over trees of tensors that cannot fail.

use std::convert::Infallible;

use candle_core::Tensor;
use pmap_mesh::TensorTree;

/// A tree of the form of `tree` with what `f` makes of each of its tensors, in their order.
pub(crate) fn map<T: TensorTree>(tree: &T, mut f: impl FnMut(&Tensor) -> Tensor) -> T {
    let Ok(mapped) = tree.try_map(&mut |leaf: &Tensor| Ok::<_, Infallible>(f(leaf)));
    mapped
}

/// What `f` says of each tensor, in their order.
pub(crate) fn each<R>(tree: &impl TensorTree, mut f: impl FnMut(&Tensor) -> R) -> Vec<R> {
    let mut said = Vec::new();
    map(tree, |leaf| {
        said.push(f(leaf));
        leaf.clone()
    });
    said
}
