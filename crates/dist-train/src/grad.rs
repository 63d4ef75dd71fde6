//! Gradients over a mesh: each replica differentiates its shard, and each slot gets some of the
//! sums.

use std::sync::Arc;

use candle_core::{Tensor, Var, backprop::GradStore};
use pmap_mesh::{ALL, DeviceMesh, PMap, Replica, Specs, TensorTree, Uneven};

use crate::{error::Result, ownership};

/// Value and gradient of a mean loss over a batch that the devices of a mesh share; made by
/// [`value_and_grad`].
#[derive(Debug)]
#[must_use = "nothing is computed until it is called"]
pub struct ValueAndGrad<I> {
    params: Vec<Var>,
    /// The positions of the parameters whose gradients each slot of this process returns.
    owned: Arc<Vec<Vec<usize>>>,
    step: PMap<I, (Tensor, Vec<Tensor>), BoxedStep<I>>,
}

type BoxedStep<I> =
    Box<dyn Fn(&Replica, I) -> candle_core::Result<(Tensor, Vec<Tensor>)> + Send + Sync>;

/// Returns a function that computes the loss of a batch and the gradient of `params`.
///
/// `loss` returns the mean over the rows of its shard, or over the first [`Replica::valid_len`] of
/// them if the shard may be padded. By default the first tensor of a batch is cut in dimension 0
/// (see [`PMap::in_axes`]); [`ValueAndGrad::in_axes`] cuts them all, or others. The result is the
/// mean over the whole batch and its gradient, even if shards are uneven
/// ([`ValueAndGrad::uneven`]): they are weighted by [`Replica::weight`].
///
/// The replicas share the variables that `loss` captured. A variable on another device than the
/// replica's must be moved with `to_device(ctx.device())`, through which gradients flow. For several
/// devices, with a copy of the model on each and an optimizer, see
/// [`DataParallel`](crate::DataParallel).
///
/// # Determinism
///
/// Sums are formed in rank order. On meshes of one size results are the same to the bit every time;
/// other sizes round differently.
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
    let sizes: Vec<u64> = params.iter().map(|var| var.elem_count() as u64).collect();
    // Every process has the sums of all parameters, divided among its own slots.
    let owned = Arc::new(ownership::divide(&sizes, mesh.devices().len()));
    let owned_by_replica = Arc::clone(&owned);
    let vars = params.clone();
    let step: BoxedStep<I> = Box::new(move |ctx, shard| {
        let (loss, grads) = differentiate(ctx, &vars, loss(ctx, shard)?)?;
        Ok((loss, ctx.psum_list(grads, &owned_by_replica[ctx.local_index()])?))
    });
    ValueAndGrad { params, owned, step: mesh.pmap(step) }
}

impl<I: TensorTree> ValueAndGrad<I> {
    /// Sets how a batch is cut for the devices, as [`PMap::in_axes`].
    pub fn in_axes(self, specs: impl Into<Specs>) -> Self {
        Self { step: self.step.in_axes(specs), ..self }
    }

    /// Sets what happens to a batch that the devices do not divide, as [`PMap::uneven`].
    pub fn uneven(self, uneven: Uneven) -> Self {
        Self { step: self.step.uneven(uneven), ..self }
    }

    /// Returns the mean loss of the batch, a scalar, and the gradient of every parameter: zeros for
    /// one that was not used.
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`](crate::Error::Mesh) with those of [`PMap::call`].
    pub fn call(&self, batch: I) -> Result<(Tensor, GradStore)> {
        let results = self.step.call_sharded(batch)?;
        let shards = results.shards();
        let mut grads = GradStore::default();
        for (owned, (_, sums)) in self.owned.iter().zip(shards) {
            for (&param, sum) in owned.iter().zip(sums) {
                grads.insert(&self.params[param], sum.clone());
            }
        }
        // All replicas have the same loss, and a process has at least one.
        Ok((shards[0].0.clone(), grads))
    }
}

/// Differentiates the mean loss of this shard.
///
/// Returns the mean loss of the whole batch, and the gradients of this shard's share of it: summed
/// over the replicas, they are the gradients of the whole batch's mean.
pub(crate) fn differentiate(
    ctx: &Replica,
    vars: &[Var],
    loss: Tensor,
) -> candle_core::Result<(Tensor, Vec<Tensor>)> {
    let share = (loss * (ctx.weight() / ctx.count() as f64))?;
    let grads = gradients(&share, vars)?;
    Ok((ctx.psum(&share.detach(), ALL)?, grads))
}

/// The gradient of every variable. One that is not used has zeros and not nothing, since all
/// replicas sum the same list.
fn gradients(value: &Tensor, vars: &[Var]) -> candle_core::Result<Vec<Tensor>> {
    let store = value.backward()?;
    vars.iter()
        .map(|var| match store.get(var) {
            Some(gradient) => Ok(gradient.clone()),
            None => var.zeros_like(),
        })
        .collect()
}
