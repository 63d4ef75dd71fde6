//! Gradients over a mesh: each replica differentiates its shard, and the sums are dealt out.

use std::sync::Arc;

use candle_core::{Tensor, Var, backprop::GradStore};

use pmap_mesh::{DeviceMesh, PMap, Replica, Specs, TensorTree, Uneven};

use crate::error::Result;

/// Value and gradient of a mean loss over a batch that the devices of a mesh share; made by
/// [`value_and_grad`].
#[derive(Debug)]
#[must_use = "nothing is computed until it is called"]
pub struct ValueAndGrad<I> {
    params: Vec<Var>,
    owned: Arc<Vec<Vec<usize>>>,
    step: PMap<I, (Tensor, Vec<Tensor>), BoxedStep<I>>,
}

type BoxedStep<I> =
    Box<dyn Fn(&Replica, I) -> candle_core::Result<(Tensor, Vec<Tensor>)> + Send + Sync>;

/// Returns a function that computes the loss of a batch and the gradient of `params`.
///
/// `loss` returns the mean over the rows of its shard: over the first [`Replica::valid_len`], if it
/// may be padded. By default the first tensor of a batch is cut in dimension 0, as
/// [`PMap::in_axes`] says; if all are to be cut, say so with [`ValueAndGrad::in_axes`]. What is
/// returned is the mean over the whole batch and its gradient, also if shards are uneven
/// ([`ValueAndGrad::uneven`]): they are weighted by [`Replica::weight`].
///
/// The replicas share the variables that `loss` captured. A variable of another device than the
/// replica's must be moved with `to_device(ctx.device())`, through which gradients run. For devices
/// of their own, replicas of the model and an optimizer, see [`DataParallel`](crate::DataParallel).
///
/// # Determinism
///
/// Sums are formed in the order of the mesh. For one mesh results are the same to the bit every
/// time; meshes of other sizes round differently.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_nn::{Optimizer, SGD};
/// use dist_train::value_and_grad;
/// use pmap_mesh::DeviceMesh;
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let w = Var::zeros((1, 1), DType::F32, &Device::Cpu)?;
/// let model = w.clone();
/// let step = value_and_grad(&mesh, vec![w.clone()], move |_, (x, y): (Tensor, Tensor)| {
///     (x.matmul(&model)? - y)?.sqr()?.mean_all()
/// })
/// .in_axes(Some(0));
///
/// let x = Tensor::new(&[[1_f32], [2.], [3.], [4.]], &Device::Cpu)?;
/// let y = (&x * 3.)?;
/// let mut optimizer = SGD::new(vec![w.clone()], 0.05)?;
/// for _ in 0..50 {
///     let (_loss, grads) = step.call((x.clone(), y.clone()))?;
///     optimizer.step(&grads)?;
/// }
/// assert!((w.to_vec2::<f32>()?[0][0] - 3.).abs() < 1e-3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn value_and_grad<I, F>(mesh: &DeviceMesh, params: Vec<Var>, loss: F) -> ValueAndGrad<I>
where
    I: TensorTree,
    F: Fn(&Replica, I) -> candle_core::Result<Tensor> + Send + Sync + 'static,
{
    let sizes: Vec<usize> = params.iter().map(|var| var.elem_count()).collect();
    let owned = Arc::new(deal(&sizes, mesh.devices().len()));
    let (of_replicas, vars) = (Arc::clone(&owned), params.clone());
    let step: BoxedStep<I> = Box::new(move |ctx, shard| {
        let (loss, grads) = differentiate(ctx, &vars, loss(ctx, shard)?)?;
        Ok((loss, ctx.psum_list(grads, &of_replicas[ctx.local_index()])?))
    });
    ValueAndGrad { params, owned, step: mesh.pmap(step) }
}

impl<I: TensorTree> ValueAndGrad<I> {
    /// Sets what each device gets of a batch, as [`PMap::in_axes`].
    pub fn in_axes(self, specs: impl Into<Specs>) -> Self {
        Self { step: self.step.in_axes(specs), ..self }
    }

    /// Sets what happens to a batch that the devices do not divide, as [`PMap::uneven`].
    pub fn uneven(self, uneven: Uneven) -> Self {
        Self { step: self.step.uneven(uneven), ..self }
    }

    /// The mean loss of the batch, a scalar, and the gradient of every parameter, zero for one that
    /// was not used.
    ///
    /// # Errors
    ///
    /// Those of [`PMap::call`].
    pub fn call(&self, batch: I) -> Result<(Tensor, GradStore)> {
        let results = self.step.call_sharded(batch)?;
        let mut grads = GradStore::default();
        for (owned, (_, sums)) in self.owned.iter().zip(results.shards()) {
            for (&param, sum) in owned.iter().zip(sums) {
                grads.insert(&self.params[param], sum.clone());
            }
        }
        Ok((results.shards()[0].0.clone(), grads))
    }
}

/// The loss of the whole batch, from this shard's mean, and this shard's share in the gradients of
/// `vars`: their sums over the replicas are those of the whole batch's mean.
pub(crate) fn differentiate(
    ctx: &Replica,
    vars: &[Var],
    loss: Tensor,
) -> candle_core::Result<(Tensor, Vec<Tensor>)> {
    let share = (loss * (ctx.weight() / ctx.count() as f64))?;
    let store = share.backward()?;
    let gradient = |var: &Var| {
        store.get(var).map_or_else(|| var.zeros_like(), |gradient| Ok(gradient.clone()))
    };
    let grads = vars.iter().map(gradient).collect::<candle_core::Result<_>>()?;
    Ok((ctx.psum(&share.detach(), pmap_mesh::ALL)?, grads))
}

/// Deals things of these sizes to `owners`, largest first to whoever has least; returns the things
/// of each.
pub(crate) fn deal(sizes: &[usize], owners: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&thing| std::cmp::Reverse(sizes[thing]));
    let mut dealt = vec![(0_usize, Vec::new()); owners];
    for thing in order {
        if let Some((load, things)) = dealt.iter_mut().min_by_key(|(load, _)| *load) {
            *load = load.saturating_add(sizes[thing]);
            things.push(thing);
        }
    }
    dealt.into_iter().map(|(_, things)| things).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_dealt_once_and_evenly() {
        assert_eq!(deal(&[5, 1, 9, 3, 3, 1], 2), [vec![2, 1, 5], vec![0, 3, 4]]);
        assert_eq!(deal(&[1], 3), [vec![0], vec![], vec![]]);
        assert_eq!(deal(&[], 2), [vec![], vec![]] as [Vec<usize>; 2]);
    }
}
