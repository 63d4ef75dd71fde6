//! The two ways to lay a model out on a mesh, by the names under which users of PyTorch look for them.

use candle_core::Result as CandleResult;
use candle_nn::VarBuilder;
use pmap_mesh::DeviceMesh;

use crate::{
    model::builder::ModelBuilder,
    units::{Units, rules::UnitRules},
};

/// Builds a model that every device has whole; PyTorch's `DistributedDataParallel` for candle.
///
/// Every slot has the model; slots on one device share its variables. A step cuts the batch,
/// differentiates the shards at the same time, sums their gradients and lets each slot of a device
/// update its part of the variables: the optimizer's work and memory are divided among the slots of
/// a device, and every device does them once.
///
/// A loss is lent what the constructor returns, or with [`by_units`](ModelBuilder::by_units)
///
/// [`Units`]: then it also runs with [`FullyShard`]. What is rejected, and what has the same bits,
/// stands at [`DistributedModel`](crate::DistributedModel).
///
/// # Where it differs from `DistributedDataParallel`
///
/// - Gradients are summed after `backward`, not during it: candle's `backward` calls nothing on its
///   way but custom operations, and one on each parameter would copy every parameter in every step.
/// - Shards are weighted by what their losses are means over ([`Loss`](crate::Loss)), so the last
///   batch of an epoch needs no padding to be exact, and a mean over tokens is one over all of them.
/// - The optimizer's state is not replicated within a device, as in ZeRO stage 1 (arXiv
///   1910.02054).
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
    /// Returns the builder of a model on every slot of `mesh`, of the layers that `model` makes of
    /// the variables that it asks its builder for: candle's own constructors.
    pub fn builder<'a, M: Send>(
        mesh: &'a DeviceMesh,
        model: impl Fn(VarBuilder<'_>) -> CandleResult<M> + 'a,
    ) -> ModelBuilder<'a, M> {
        // `M: Send` is asked for here and not at `step`, so that a model with an `Rc` is rejected
        // where it is built.
        ModelBuilder::new(mesh, Box::new(model))
    }
}

/// Builds a model whose parameters, gradients and optimizer state are cut over the devices of a mesh;
/// PyTorch's `fully_shard` (FSDP2), DeepSpeed's ZeRO stage 3.
///
/// Each slot keeps its part of every parameter. A loss is written by [units](Units::unit): entering
/// one gathers its parameters for as long as its function runs, and its backward gathers them again
/// and hands each slot its part of the summed gradients. So a slot holds one unit's parameters and
/// gradients, and of all others its part.
///
/// The same loss runs with a [`DataParallel`] [by units](ModelBuilder::by_units), which becomes this
/// by [`fully_shard`](ModelBuilder::fully_shard). What is rejected, and what has the same bits,
/// stands at [`DistributedModel`](crate::DistributedModel).
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
/// // The constructor as for plain candle: names, shapes and initializers are read off it.
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
    /// Returns the builder of a model that is cut over the slots of `mesh`, of the parameters that
    /// `model`, a constructor as for plain candle, asks its builder for. What it returns is dropped:
    /// units make their layers themselves.
    ///
    /// Units are numbered blocks; [`by_units`](ModelBuilder::by_units) and
    /// [`unit`](ModelBuilder::unit) name others.
    pub fn builder<'a, M: 'a>(
        mesh: &'a DeviceMesh,
        model: impl Fn(VarBuilder<'_>) -> CandleResult<M> + 'a,
    ) -> ModelBuilder<'a, Units> {
        ModelBuilder::new(mesh, Box::new(model)).by_units(UnitRules::new()).fully_shard()
    }
}
