//! Arguments and results: one tensor or several, in any nesting of tuples and vectors.

use candle_core::Tensor;

/// A value made of tensors, which can be cut and put together tensor by tensor.
///
/// Implemented for [`Tensor`], `()`, pairs, triples and vectors; implement it for your own struct to pass that.
///
/// # Examples
///
/// ```
/// use candle_core::Tensor;
/// use pmap_mesh::TensorTree;
///
/// struct Batch {
///     ids: Tensor,
///     mask: Tensor,
/// }
///
/// impl TensorTree for Batch {
///     fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
///         Ok(Self { ids: f(&self.ids)?, mask: f(&self.mask)? })
///     }
/// }
/// ```
pub trait TensorTree: Sized + Send + 'static {
    /// Returns a value of the same structure with every tensor replaced by what `f` makes of it.
    ///
    /// `f` must be called once for each tensor, always in the same order.
    ///
    /// # Errors
    ///
    /// The first error of `f`.
    fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E>;
}

/// The tensors of `tree`, in order.
pub(crate) fn leaves(tree: &impl TensorTree) -> Vec<Tensor> {
    let mut leaves = Vec::new();
    let visited: Result<_, std::convert::Infallible> = tree.try_map(&mut |leaf| {
        leaves.push(leaf.clone());
        Ok(leaf.clone())
    });
    drop(visited);
    leaves
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

impl<T: TensorTree, U: TensorTree> TensorTree for (T, U) {
    fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        Ok((self.0.try_map(f)?, self.1.try_map(f)?))
    }
}

impl<T: TensorTree, U: TensorTree, V: TensorTree> TensorTree for (T, U, V) {
    fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        Ok((self.0.try_map(f)?, self.1.try_map(f)?, self.2.try_map(f)?))
    }
}

impl<T: TensorTree> TensorTree for Vec<T> {
    fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        self.iter().map(|tree| tree.try_map(f)).collect()
    }
}
