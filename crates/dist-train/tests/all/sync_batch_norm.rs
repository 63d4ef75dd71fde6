//! Batch norm over all replicas matches one device.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{
    BatchNorm, BatchNormConfig, Linear, Module, ModuleT, Optimizer, VarBuilder, batch_norm, linear,
};
use dist_train::{DataParallel, Loss, ParamsSgd, Sgd, SyncBatchNorm};
use pmap_mesh::{DeviceMesh, Replica, Uneven};

const FEATURES: usize = 3;
const LENGTH: usize = 4;
const STEPS: usize = 4;

/// Returns the losses of some steps and an evaluation, and the final variables.
fn run<N: Send>(
    slots: usize,
    (rows, uneven): (usize, Uneven),
    norm: impl Fn(VarBuilder<'_>) -> Result<N>,
    forward: impl Fn(&Replica, &N, &Tensor, bool) -> Result<Tensor> + Sync,
) -> Vec<f64> {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    // The stem's gradient passes through the statistics.
    let layers = |vb: VarBuilder<'_>| {
        let stem = linear(FEATURES, FEATURES, vb.pp("stem"))?;
        Ok((stem, norm(vb.pp("norm"))?, linear(FEATURES, 2, vb.pp("head"))?))
    };
    let mut model = DataParallel::builder(&mesh, layers)
        .dtype(DType::F64)
        .uneven(uneven)
        .build(|group| Sgd::new(group.vars, ParamsSgd { lr: 0.3, ..ParamsSgd::default() }))
        .unwrap();
    let loss = |train: bool| {
        let forward = &forward;
        move |ctx: &Replica, model: &(Linear, N, Linear), (x, weights): (Tensor, Tensor)| {
            let (stem, norm, head) = model;
            let x = stem.forward(&x)?.transpose(1, 2)?.contiguous()?;
            // [rows, features, length] to [rows, length, features]
            let normed = forward(ctx, norm, &x, train)?.transpose(1, 2)?.contiguous()?;
            let row_losses = head.forward(&normed)?.tanh()?.sqr()?.sum((1, 2))?;
            Ok(Loss::sum((row_losses * &weights)?.sum_all()?, weights.sum_all()?))
        }
    };
    let batch = |step: usize| {
        let items = (0..rows * FEATURES * LENGTH).map(|n| ((n * 7 + step * 13) as f64).sin() * 3.0);
        let x = Tensor::from_iter(items, &Device::Cpu).unwrap();
        let weights = Tensor::ones(rows, DType::F64, &Device::Cpu).unwrap();
        ((x + 1.0).unwrap().reshape((rows, LENGTH, FEATURES)).unwrap(), weights)
    };
    let mut all: Vec<f64> =
        (0..STEPS).map(|step| model.step(batch(step), loss(true)).unwrap().loss).collect();
    assert!(all.windows(2).all(|pair| (pair[0] - pair[1]).abs() > 1e-6), "{all:?}");
    all.push(model.evaluate(batch(STEPS), loss(false)).unwrap().loss);
    for variable in model.parameters().unwrap().into_values() {
        all.extend(variable.flatten_all().unwrap().to_vec1::<f64>().unwrap());
    }
    all
}

fn sync_batch_norm(vb: VarBuilder<'_>) -> Result<SyncBatchNorm> {
    SyncBatchNorm::new(FEATURES, BatchNormConfig::default(), vb)
}

fn synchronized(slots: usize, rows: usize, uneven: Uneven) -> Vec<f64> {
    run(slots, (rows, uneven), sync_batch_norm, |ctx, norm: &SyncBatchNorm, x, train| {
        norm.forward_t(ctx, x, train)
    })
}

fn assert_near(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-12, "{found} {expected}");
    }
}

#[test]
fn one_device_equals_candle() {
    let expected = run(
        1,
        (7, Uneven::Refuse),
        |vb| batch_norm(FEATURES, BatchNormConfig::default(), vb),
        |_, norm: &BatchNorm, x, train| norm.forward_t(x, train),
    );
    assert_near(&synchronized(1, 7, Uneven::Refuse), &expected);
}

#[test]
fn every_mesh_equals_one_device() {
    // With 5 padded rows on 4 devices, the last has only padding.
    for rows in [5, 7] {
        let expected = synchronized(1, rows, Uneven::Refuse);
        for slots in 2..=4 {
            for uneven in [Uneven::Balanced, Uneven::Pad] {
                assert_near(&synchronized(slots, rows, uneven), &expected);
            }
        }
    }
}

/// bf16 represents 200 and 201, but neither their sum nor their mean.
#[test]
fn bf16_is_normalized_in_f32() {
    let rows: Vec<f32> = (0..8).map(|row| 200.0 + (row % 2) as f32).collect();
    let x = Tensor::from_vec(rows, (8, 1), &Device::Cpu).unwrap();
    for slots in [1, 2] {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        let norm = |vb: VarBuilder<'_>| SyncBatchNorm::new(1, BatchNormConfig::default(), vb);
        let mut model = DataParallel::builder(&mesh, norm)
            .dtype(DType::BF16)
            .build(|group| Sgd::new(group.vars, ParamsSgd::default()))
            .unwrap();
        let size = model.evaluate(x.clone(), |ctx: &Replica, norm: &SyncBatchNorm, x| {
            norm.forward_t(ctx, &x.to_dtype(DType::BF16)?, true)?.abs()?.mean_all()
        });
        let found = size.unwrap().loss;
        assert!((found - 1.0).abs() < 1e-6, "{slots} slots: {found}");
    }
}

#[test]
fn unfit_inputs_are_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let forward = |x: Tensor, rows: usize| {
        let mut model = DataParallel::builder(&mesh, sync_batch_norm)
            .uneven(Uneven::Pad)
            .build(|group| Sgd::new(group.vars, ParamsSgd::default()))
            .unwrap();
        let outcome = model.step(x, |ctx: &Replica, norm: &SyncBatchNorm, x| {
            norm.forward_t(ctx, &x.reshape((x.elem_count() / rows, rows))?, true)?.sum_all()
        });
        outcome.unwrap_err().to_string()
    };
    let ones = |rows: usize, width: usize| Tensor::ones((rows, width), DType::F32, &Device::Cpu);
    // Rows and positions share a dimension.
    let error = forward(ones(3, 2 * FEATURES).unwrap(), FEATURES);
    assert!(error.contains("of 4 rows, where the shard has"), "{error}");
    let error = forward(ones(1, FEATURES).unwrap(), FEATURES);
    assert!(error.contains("more than one item of each feature"), "{error}");
    let error = forward(ones(4, 2).unwrap(), 2);
    assert!(error.contains("3 features"), "{error}");
}
