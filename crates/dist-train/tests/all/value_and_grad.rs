//! Gradients over a mesh: rejected losses, empty shards and half precision.

use candle_core::{DType, Device, Result, Tensor, Var};
use dist_train::{Error, TrainingError, value_and_grad};
use pmap_mesh::{ALL, DeviceMesh, Replica, Uneven};

fn ones(dims: (usize, usize), dtype: DType) -> Var {
    Var::ones(dims, dtype, &Device::Cpu).unwrap()
}

fn items(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Multiplies the mean over a shard's rows by a sum over all replicas, which spreads the NaN of an
/// empty shard.
fn spoiled(ctx: &Replica, w: &Var, x: &Tensor) -> Result<Tensor> {
    let rows = x.narrow(0, 0, ctx.valid_len().unwrap())?.matmul(w)?;
    rows.mean_all()? * ctx.pvary(&ctx.psum(&w.sum_all()?, ALL)?, ALL)?
}

#[test]
fn non_finite_gradients_are_rejected() {
    let mesh = DeviceMesh::cpu(4).unwrap();
    let (unused, w) = (ones((1, 1), DType::F32), ones((2, 1), DType::F32));
    let model = w.clone();
    let step = || {
        let model = model.clone();
        let params = vec![unused.clone(), w.clone()];
        let step = value_and_grad(&mesh, params, move |ctx, x| spoiled(ctx, &model, &x));
        step.uneven(Uneven::Pad)
    };
    let rows = |n: usize| Tensor::ones((n, 2), DType::F32, &Device::Cpu).unwrap();
    let outcome = step().call(rows(3));
    let Err(Error::Training(TrainingError::NonFiniteGradient { index, shape })) = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!((index, shape), (1, vec![2, 1]));
    let (_, grads) = step().call(rows(4)).unwrap();
    assert_eq!(items(grads.get(&w).unwrap()), [16.0, 16.0]);
}

/// The last slot has no rows, but the others use its gathered tensor.
#[test]
fn empty_shards_receive_gradients() {
    let mesh = DeviceMesh::cpu(4).unwrap();
    let w = ones((1, 2), DType::F32);
    let model = w.clone();
    let step = value_and_grad(&mesh, vec![w.clone()], move |ctx, x: Tensor| {
        let gathered = ctx.all_gather(&model, 0, ALL)?;
        x.matmul(&gathered.sum_keepdim(0)?.t()?)?.mean_all()
    });
    let x = Tensor::ones((3, 2), DType::F32, &Device::Cpu).unwrap();
    let (_, grads) = step.uneven(Uneven::Pad).call(x).unwrap();
    assert_eq!(items(grads.get(&w).unwrap()), [4.0, 4.0]);
}

/// Half precision would round the row weight of a third by 0.2 %.
#[test]
fn row_weights_are_not_rounded() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    for (params, loss) in [(DType::F32, DType::BF16), (DType::BF16, DType::F32)] {
        let w = ones((2, 1), params);
        let model = w.clone();
        let step = value_and_grad(&mesh, vec![w.clone()], move |_, x: Tensor| {
            x.to_dtype(params)?.matmul(&model)?.to_dtype(loss)?.mean_all()
        });
        let x = Tensor::ones((3, 2), DType::F32, &Device::Cpu).unwrap();
        let (_, grads) = step.call(x).unwrap();
        let gradient = grads.get(&w).unwrap();
        assert_eq!(gradient.dtype(), DType::F32);
        assert_eq!(items(gradient), [1.0, 1.0], "parameters {params:?}, loss {loss:?}");
    }
}

/// Slots without a gradient add zeros of the same dtype as the others.
#[test]
fn bf16_gradients_of_one_slot_count() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let w = ones((2, 1), DType::BF16);
    let model = w.clone();
    let step = value_and_grad(&mesh, vec![w.clone()], move |ctx, x: Tensor| {
        let x = x.to_dtype(DType::BF16)?;
        if ctx.slot() == 1 { x.matmul(&model)?.mean_all() } else { x.mean_all() }
    });
    let x = Tensor::ones((6, 2), DType::F32, &Device::Cpu).unwrap();
    let (_, grads) = step.call(x).unwrap();
    let found = items(grads.get(&w).unwrap());
    assert!(found.iter().all(|item| (item - 1.0 / 3.0).abs() < 1e-6), "{found:?}");
}
