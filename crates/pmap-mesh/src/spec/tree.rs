//! Arguments and results: one tensor or several, in any nesting of tuples, vectors and maps.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    hash::{BuildHasher, Hash},
};

use candle_core::Tensor;

/// A value made of tensors, which can be cut and joined tensor by tensor, like a pytree of JAX.
///
/// It is implemented for [`Tensor`], `()`, tuples of up to six elements, vectors, options, and
/// maps, in the order of their keys (as in JAX). [`tensor_tree!`](crate::tensor_tree) implements it
/// for your structs.
pub trait TensorTree: Sized + Send + 'static {
    /// Returns a value of the same structure, with every tensor replaced by the result of `f`.
    ///
    /// An implementation must call `f` once for each tensor, always in the same order.
    ///
    /// # Errors
    ///
    /// The first error of `f`.
    fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E>;

    /// Returns the number of tensors of each argument, since specs may be given for each argument.
    ///
    /// The elements of a tuple are arguments; in other types, each tensor is an argument.
    fn parts(&self) -> Vec<usize> {
        vec![1; count(self)]
    }
}

/// Returns the tensors of `tree`, in order.
pub(crate) fn leaves(tree: &impl TensorTree) -> Vec<Tensor> {
    let mut leaves = Vec::new();
    let Ok(_) = tree.try_map(&mut |leaf| {
        leaves.push(leaf.clone());
        Ok::<_, Infallible>(leaf.clone())
    });
    leaves
}

/// Calls [`TensorTree::try_map`] with the index of each tensor.
pub(crate) fn try_map_indexed<T: TensorTree, E>(
    tree: &T,
    mut f: impl FnMut(usize, &Tensor) -> Result<Tensor, E>,
) -> Result<T, E> {
    let mut next = 0;
    tree.try_map(&mut |leaf| {
        let index = next;
        next += 1;
        f(index, leaf)
    })
}

/// Returns a value of the same structure with the tensors of `leaves`, one for each tensor of
/// `tree`.
pub(crate) fn with_leaves<T: TensorTree>(tree: &T, leaves: &[Tensor]) -> T {
    let Ok(tree) = try_map_indexed(tree, |index, _| Ok::<_, Infallible>(leaves[index].clone()));
    tree
}

/// Returns the number of tensors of a tree.
fn count(tree: &impl TensorTree) -> usize {
    let mut count = 0;
    let Ok(_) = tree.try_map(&mut |leaf| {
        count += 1;
        Ok::<_, Infallible>(leaf.clone())
    });
    count
}

impl TensorTree for Tensor {
    fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        f(self)
    }
}

impl TensorTree for () {
    fn try_map<E>(&self, _: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        Ok(())
    }
}

impl<T: TensorTree> TensorTree for Vec<T> {
    fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        self.iter().map(|tree| tree.try_map(f)).collect()
    }
}

impl<T: TensorTree> TensorTree for Option<T> {
    fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        self.as_ref().map(|tree| tree.try_map(f)).transpose()
    }
}

impl<K: Ord + Clone + Send + 'static, T: TensorTree> TensorTree for BTreeMap<K, T> {
    fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        self.iter().map(|(key, tree)| Ok((key.clone(), tree.try_map(f)?))).collect()
    }
}

/// The tensors are in the order of the keys. A function that runs a collective for each entry must
/// also sort the keys, since the iteration order of the map differs between processes.
#[expect(clippy::disallowed_types, reason = "the iteration order of the map is not used")]
impl<K, T, S> TensorTree for std::collections::HashMap<K, T, S>
where
    K: Ord + Hash + Clone + Send + 'static,
    T: TensorTree,
    S: BuildHasher + Clone + Send + 'static,
{
    fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        let mut mapped = Self::with_capacity_and_hasher(self.len(), self.hasher().clone());
        for (key, tree) in self.iter().collect::<BTreeMap<_, _>>() {
            mapped.insert(key.clone(), tree.try_map(f)?);
        }
        Ok(mapped)
    }
}

/// Implements [`TensorTree`](crate::TensorTree) for a struct: the fields in `data` are trees, and
/// the fields in `meta` are cloned. The names follow `jax.tree_util.register_dataclass`.
///
/// All fields must be named.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use pmap_mesh::{DeviceMesh, tensor_tree};
///
/// struct Batch {
///     ids: Tensor,
///     masks: Vec<Tensor>,
///     split: String,
/// }
/// tensor_tree!(Batch { data: [ids, masks], meta: [split] });
///
/// let ids = Tensor::arange(0_u32, 8, &Device::Cpu)?;
/// let batch = Batch { masks: vec![ids.ones_like()?], ids, split: "train".to_owned() };
/// let mesh = DeviceMesh::cpu(2)?;
/// let first = mesh.pmap(|_, batch: Batch| {
///     assert_eq!(batch.split, "train");
///     batch.ids.narrow(0, 0, 1)?.mul(&batch.masks[0].narrow(0, 0, 1)?)
/// });
/// assert_eq!(first.call(batch)?.to_vec1::<u32>()?, [0, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[macro_export]
macro_rules! tensor_tree {
    ($name:ident { data: [$($data:ident),* $(,)?] $(, meta: [$($meta:ident),* $(,)?])? $(,)? }) => {
        impl $crate::TensorTree for $name {
            fn try_map<E>(
                &self,
                f: &mut impl ::core::ops::FnMut(
                    &$crate::__Tensor,
                ) -> ::core::result::Result<$crate::__Tensor, E>,
            ) -> ::core::result::Result<Self, E> {
                ::core::result::Result::Ok(Self {
                    $($data: $crate::TensorTree::try_map(&self.$data, f)?,)*
                    $($($meta: ::core::clone::Clone::clone(&self.$meta),)*)?
                })
            }
        }
    };
}

macro_rules! tuple_of_trees {
    ($($tree:ident $field:tt),+) => {
        impl<$($tree: TensorTree),+> TensorTree for ($($tree,)+) {
            fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
                Ok(($(self.$field.try_map(f)?,)+))
            }

            fn parts(&self) -> Vec<usize> {
                vec![$(count(&self.$field)),+]
            }
        }
    };
}

tuple_of_trees!(A 0, B 1);
tuple_of_trees!(A 0, B 1, C 2);
tuple_of_trees!(A 0, B 1, C 2, D 3);
tuple_of_trees!(A 0, B 1, C 2, D 3, G 4);
tuple_of_trees!(A 0, B 1, C 2, D 3, G 4, H 5);
