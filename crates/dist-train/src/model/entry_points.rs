//! The two layouts of a model, under the names that PyTorch users look for.

use candle_core::Result as CandleResult;
use candle_nn::VarBuilder;
use pmap_mesh::DeviceMesh;

use crate::{
    model::builder::ModelBuilder,
    units::{Units, rules::UnitRules},
};

/// Builds a model with a full replica on every device, like PyTorch's `DistributedDataParallel`.
///
/// Every slot has the model; slots on one device share its variables. A step splits the batch,
/// differentiates all shards in parallel, and reduces their gradients. Each slot of a device then
/// updates a part of the variables, so the optimizer's work and memory are divided among the slots
/// of a device, and done once per device.
///
/// A loss borrows the constructor's return value, or, with [`by_units`](ModelBuilder::by_units),
/// [`Units`]; it then also runs with [`FullyShard`].
///
/// [`DistributedModel`](crate::DistributedModel) lists the rejected models and steps, and the cases
/// with identical bits.
///
/// # Differences from `DistributedDataParallel`
///
/// - Gradients are reduced after `backward`, not during it: candle's `backward` has no hooks except
///   custom operations, and a custom operation on each parameter would copy every parameter in
///   every step.
/// - Shards are weighted by the number of rows or tokens in their losses ([`Loss`](crate::Loss)),
///   so the last batch of an epoch is exact without padding, and a mean over tokens covers the
///   tokens of all shards.
/// - The optimizer state is not replicated within a device, as in ZeRO stage 1 (arXiv 1910.02054).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, linear, loss::mse};
/// use dist_train::{AdamW, DataParallel};
/// use pmap_mesh::{DeviceMesh, Replica};
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let params = ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() };
/// let mut model = DataParallel::builder(&mesh, |vb| linear(3, 1, vb))
///     .clip_grad_norm(1.0)
///     .build(|group| AdamW::new(group.vars, params.clone()))?;
///
/// let x = Tensor::randn(0_f32, 1., (16, 3), &Device::Cpu)?;
/// let y = x.sum_keepdim(1)?;
/// let loss = |_: &Replica, model: &Linear, (x, y): (Tensor, Tensor)| mse(&model.forward(&x)?, &y);
/// let first = model.step((x.clone(), y.clone()), loss)?.loss;
/// for _ in 0..100 {
///     model.step((x.clone(), y.clone()), loss)?;
/// }
/// assert!(model.evaluate((x, y), loss)?.loss < first / 10.);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[doc(alias = "DistributedDataParallel")]
#[doc(alias = "DDP")]
pub struct DataParallel;

impl DataParallel {
    /// Returns the builder of a model with a replica on every slot of `mesh`. `model` is a
    /// constructor as for plain candle, which builds layers from the variables it requests.
    pub fn builder<'a, M: Send>(
        mesh: &'a DeviceMesh,
        model: impl Fn(VarBuilder<'_>) -> CandleResult<M> + 'a,
    ) -> ModelBuilder<'a, M> {
        // The bound `M: Send` is here rather than on `step`, so that a model with an `Rc` is
        // rejected where it is built.
        ModelBuilder::new(mesh, Box::new(model))
    }
}

/// Builds a model with parameters, gradients and optimizer state sharded over the devices of a
/// mesh, like PyTorch's `fully_shard` (FSDP2) and DeepSpeed's ZeRO stage 3.
///
/// Each slot stores a shard of every parameter. A loss is written by [units](Units::unit): entering
/// a unit gathers its parameters while its function runs, and its backward pass gathers them again
/// and reduce-scatters the gradients. So a slot stores the full parameters and gradients of one
/// unit at a time, and its shards of all units.
///
/// The same loss runs with a [`DataParallel`] model [by units](ModelBuilder::by_units), which
/// [`fully_shard`](ModelBuilder::fully_shard) converts to this layout.
/// [`DistributedModel`](crate::DistributedModel) lists the rejected models and steps, and the cases
/// with identical bits.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Module, ParamsAdamW, VarBuilder, linear};
/// use dist_train::{AdamW, FullyShard, Units};
/// use candle_nn::Optimizer;
/// use pmap_mesh::{DeviceMesh, Replica};
///
/// // The constructor for plain candle, which declares names, shapes and initializers.
/// let build = |vb: VarBuilder<'_>| {
///     for n in 0..3 {
///         linear(4, 4, vb.pp(format!("blocks.{n}")))?;
///     }
///     linear(4, 1, vb.pp("head"))
/// };
/// let loss = |_: &Replica, model: &Units, (x, y): (Tensor, Tensor)| {
///     let mut x = x;
///     for n in 0..3 {
///         let block = |vb: VarBuilder<'_>, x: &Tensor| linear(4, 4, vb)?.forward(x)?.tanh();
///         x = model.unit(&format!("blocks.{n}"), &x, block)?;
///     }
///     let found = model.unit("head", &x, |vb, x| linear(4, 1, vb)?.forward(x))?;
///     (found - y)?.sqr()?.mean_all()
/// };
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let params = ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() };
/// let mut model = FullyShard::builder(&mesh, build)
///     .unit("head", ["head"])
///     .build(|group| AdamW::new(group.vars, params.clone()))?;
/// let x = Tensor::randn(0_f32, 1., (8, 4), &Device::Cpu)?;
/// let y = x.mean_keepdim(1)?;
/// let first = model.step((x.clone(), y.clone()), loss)?.loss;
/// for _ in 0..20 {
///     model.step((x.clone(), y.clone()), loss)?;
/// }
/// assert!(model.evaluate((x, y), loss)?.loss < first / 2.);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[doc(alias = "fully_shard")]
#[doc(alias = "FSDP")]
pub struct FullyShard;

impl FullyShard {
    /// Returns the builder of a model sharded over the slots of `mesh`. `model` is a constructor as
    /// for plain candle, which declares the parameters. Its return value is dropped, because units
    /// build their own layers.
    ///
    /// Numbered blocks are units; [`by_units`](ModelBuilder::by_units) and
    /// [`unit`](ModelBuilder::unit) define others.
    pub fn builder<'a, M: 'a>(
        mesh: &'a DeviceMesh,
        model: impl Fn(VarBuilder<'_>) -> CandleResult<M> + 'a,
    ) -> ModelBuilder<'a, Units> {
        ModelBuilder::new(mesh, Box::new(model)).by_units(UnitRules::new()).fully_shard()
    }
}
