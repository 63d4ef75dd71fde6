//! Peak memory of a replicated step, of an optimizer and of saving a checkpoint.

use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use candle_nn::{AdamW, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
use dist_train::{Checkpoints, DataParallel, ParamsSgd, Sgd};
use pmap_mesh::DeviceMesh;

use crate::{MEMORY, alone, without_new_buffers};

const SIZE: usize = 256;
/// Many layers, as in models that need several devices, so that temporaries of one layer are small
/// compared with all parameters.
const LAYERS: usize = 24;

fn model(vb: VarBuilder<'_>) -> candle_core::Result<Vec<Linear>> {
    (0..LAYERS).map(|layer| linear(SIZE, SIZE, vb.pp(layer))).collect()
}

fn loss(model: &[Linear], x: &Tensor) -> candle_core::Result<Tensor> {
    model.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.relu())?.sqr()?.mean_all()
}

/// Returns the peak of memory that steps add, in bytes.
fn peak_of(mut step: impl FnMut()) -> usize {
    // The first step allocates permanent buffers, such as an optimizer's state.
    step();
    without_new_buffers(|before| {
        MEMORY.reset_peak_usage();
        (0..3).for_each(|_| step());
        MEMORY.peak_usage() - before
    })
}

#[test]
fn step_adds_only_slot_gradients() {
    let _alone = alone();
    let x = Tensor::ones((64, SIZE), DType::F32, &Device::Cpu).unwrap();
    let adam = |vars| AdamW::new(vars, ParamsAdamW::default());
    let vars = VarMap::new();
    let plain_model = model(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
    let mut optimizer = adam(vars.all_vars()).unwrap();
    let plain = peak_of(|| optimizer.backward_step(&loss(&plain_model, &x).unwrap()).unwrap());

    let params = LAYERS * (SIZE * SIZE + SIZE) * size_of::<f32>();
    for slots in [1, 4] {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        let mut trained =
            DataParallel::builder(&mesh, model).build(|group| adam(group.vars)).unwrap();
        let peak = peak_of(|| {
            trained.step(x.clone(), |_, model: &Vec<Linear>, x: Tensor| loss(model, &x)).unwrap();
        });
        let more = peak.saturating_sub(plain);
        // With one slot, its gradients are the sums, as in plain candle.
        let gradients = if slots == 1 { 0 } else { params * slots };
        // Temporaries of one layer.
        let rest = 4 * SIZE * SIZE * size_of::<f32>();
        assert!(
            more <= gradients + rest,
            "{slots} slots: {more} more than {plain} bytes, parameters {params}"
        );
    }
}

#[test]
fn saving_copies_tensors_one_by_one() {
    let _alone = alone();
    let mesh = DeviceMesh::cpu(1).unwrap();
    let trained = DataParallel::builder(&mesh, model)
        .build(|group| candle_nn::SGD::new(group.vars, 0.1))
        .unwrap();
    let state = trained.state_dict().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let mut steps = 0..;
    let peak = peak_of(|| checkpoints.save(&mesh, steps.next().unwrap(), &state, &()).unwrap());
    let tensor = SIZE * SIZE * size_of::<f32>();
    let buffer = 1 << 20;
    assert!(peak < buffer + 3 * tensor, "{peak} bytes for tensors of {tensor}");
}

#[test]
fn optimizers_allocate_no_full_tensor() {
    let _alone = alone();
    let params = ParamsSgd { momentum: 0.9, ..ParamsSgd::default() };
    for dtype in [DType::F32, DType::BF16] {
        let var = Var::ones((1000, 400), dtype, &Device::Cpu).unwrap();
        let gradient = Tensor::ones((400, 1000), dtype, &Device::Cpu).unwrap();
        let mut gradients = GradStore::default();
        // Transposed, like the gradient of a layer's weight.
        gradients.insert(&var, gradient.t().unwrap());
        let mut adam = dist_train::AdamW::new_lr(vec![var.clone()], 0.1).unwrap();
        let mut sgd = Sgd::new(vec![var.clone()], params.clone()).unwrap();
        let peaks =
            [peak_of(|| adam.step(&gradients).unwrap()), peak_of(|| sgd.step(&gradients).unwrap())];
        for peak in peaks {
            assert!(peak < 16 * 1024, "{peak} bytes for a variable of 400,000 items of {dtype:?}");
        }
    }
}
