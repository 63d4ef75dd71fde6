//! Low-rank adapters: results, training and files.

mod files;
mod naive;
mod refusals;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, Optimizer, VarBuilder, linear, linear_no_bias};
use dist_train::{
    DataParallel, DistributedModel, FullyShard, Group, Lora, ParamsSgd, Sgd, UnitRules, Units,
};
use fused_ops::layers;
use pmap_mesh::{DeviceMesh, Replica};

pub(crate) const BLOCKS: usize = 2;
pub(crate) const RATE: f64 = 0.05;

/// Returns adapters for one of two layers in each block.
pub(crate) fn lora() -> Lora {
    Lora::new(["up"], 2, 3.0).unwrap()
}

pub(crate) fn model(vb: VarBuilder<'_>) -> Result<Vec<(Linear, Linear)>> {
    (0..BLOCKS).map(|n| block_layers(vb.pp(format!("h.{n}")))).collect()
}

pub(crate) fn block_layers(vb: VarBuilder<'_>) -> Result<(Linear, Linear)> {
    Ok((linear(4, 6, vb.pp("mlp.up"))?, linear_no_bias(6, 4, vb.pp("mlp.down"))?))
}

/// Runs a block; the code has no reference to adapters.
pub(crate) fn block(vb: VarBuilder<'_>, x: &Tensor) -> Result<Tensor> {
    let (up, down) = block_layers(vb)?;
    down.forward(&up.forward(x)?.tanh()?)
}

/// Runs the block with layers that apply adapters themselves.
pub(crate) fn fused_block(vb: VarBuilder<'_>, x: &Tensor) -> Result<Tensor> {
    let up = layers::linear(4, 6, vb.pp("mlp.up"))?;
    layers::linear_no_bias(6, 4, vb.pp("mlp.down"))?.forward(&up.forward(x)?.tanh()?)
}

pub(crate) fn loss_by_units(
    lora: &Lora,
    block: fn(VarBuilder<'_>, &Tensor) -> Result<Tensor>,
) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> + Clone + Send + Sync + 'static {
    let block = lora.unit(block);
    move |_: &Replica, model: &Units, mut x: Tensor| {
        for n in 0..BLOCKS {
            x = model.unit(&format!("h.{n}"), &x, block.clone())?;
        }
        loss(&x)
    }
}

pub(crate) fn loss(y: &Tensor) -> Result<Tensor> {
    (y - 0.5)?.sqr()?.mean_all()
}

pub(crate) fn sgd(group: Group) -> Result<Sgd> {
    Sgd::new(group.vars, ParamsSgd { lr: RATE, ..ParamsSgd::default() })
}

pub(crate) fn batch(step: usize) -> Tensor {
    let x = Tensor::arange(0_f64, 32., &Device::Cpu).unwrap();
    let shifted = x.affine(0.07, -0.1 * step as f64).unwrap();
    shifted.sin().unwrap().reshape((8, 4)).unwrap()
}

/// Builds a sharded f64 model that trains only adapters.
pub(crate) fn sharded(mesh: &DeviceMesh, lora: &Lora) -> DistributedModel<Units, Sgd> {
    let builder = FullyShard::builder(mesh, lora.adapt(model));
    builder.dtype(DType::F64).train_only(Lora::PATTERNS).build(sgd).unwrap()
}

/// Builds a replicated f64 model that trains only adapters.
pub(crate) fn whole(mesh: &DeviceMesh, lora: &Lora) -> DistributedModel<Units, Sgd> {
    let builder = DataParallel::builder(mesh, lora.adapt(model)).by_units(UnitRules::new());
    builder.dtype(DType::F64).train_only(Lora::PATTERNS).build(sgd).unwrap()
}
