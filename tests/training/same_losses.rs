//! Token means, dropout and batch norm: what one device computes, two, three and four compute too.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_distributed::{
    mesh::{ALL, DeviceMesh, Replica, Uneven},
    ops::{self, CrossEntropyConfig, DropoutKey},
    train::{AdamW, DataParallel, Loss},
    types::Seed,
};
use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, VarBuilder, linear};

const STEPS: u64 = 6;
const ROWS: usize = 7;
const FEATURES: usize = 5;

/// The losses of some steps on `slots` devices, on seven rows that most of them do not divide.
fn losses<M: Send + 'static>(
    slots: usize,
    build: impl Fn(VarBuilder<'_>) -> Result<M>,
    loss: impl Fn(u64, &Replica, &M, Rows) -> Result<Loss> + Clone + Send + Sync + 'static,
) -> Vec<f64> {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    let params = ParamsAdamW { lr: 0.02, ..ParamsAdamW::default() };
    let mut model = DataParallel::builder(&mesh, build)
        .init(Seed::new(1))
        .uneven(Uneven::Balanced)
        .clip_grad_norm(0.5)
        .build(|group| AdamW::new(group.vars, params.clone()))
        .unwrap();
    let mut step = |step| {
        let loss = loss.clone();
        let loss = move |ctx: &Replica, model: &M, rows: Rows| loss(step, ctx, model, rows);
        model.step(rows(step).unwrap(), loss).unwrap().loss
    };
    (0..STEPS).map(&mut step).collect()
}
