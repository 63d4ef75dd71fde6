//! Token means, dropout and batch norm: what one device computes, two, three and four compute too.

use candle_core::{Device, Result, Tensor};
use candle_distributed::{
    mesh::{BatchKeys, DeviceMesh, Replica, TensorTree, Uneven},
    ops::{self, CrossEntropyConfig, DropoutKey},
    train::{AdamW, DataParallel, Loss, SyncBatchNorm},
    types::Seed,
};
use candle_nn::{
    Linear, Module, Optimizer, ParamsAdamW, VarBuilder, linear, linear_no_bias, loss::mse,
};

const STEPS: u64 = 6;
/// Neither 2 nor 3 nor 4 devices divide them.
const ROWS: usize = 7;
const FEATURES: usize = 5;

/// The losses of some steps on `slots` devices, and then the loss of an evaluation.
fn losses<M: Send, I: TensorTree>(
    slots: usize,
    uneven: Uneven,
    build: impl Fn(VarBuilder<'_>) -> Result<M>,
    batch: impl Fn(u64) -> Result<I>,
    loss: impl Fn(&Replica, &M, I) -> Result<Loss> + Sync,
) -> Vec<f64> {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    let params = ParamsAdamW { lr: 0.02, ..ParamsAdamW::default() };
    let mut model = DataParallel::builder(&mesh, build)
        .init(Seed::new(1))
        .uneven(uneven)
        .clip_grad_norm(0.5)
        .build(|group| AdamW::new(group.vars, params.clone()))
        .unwrap();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        losses.push(model.step(batch(step).unwrap(), &loss).unwrap().loss);
    }
    losses.push(model.evaluate(batch(STEPS).unwrap(), &loss).unwrap().loss);
    losses
}

/// Checks that one to four devices have the same losses, and that these are not all the same.
fn check(losses_on: impl Fn(usize) -> Vec<f64>) {
    let expected = losses_on(1);
    assert!(expected.windows(2).all(|pair| (pair[0] - pair[1]).abs() > 1e-4), "{expected:?}");
    for slots in 2..=4 {
        let found = losses_on(slots);
        // A NaN is not near anything, so it fails.
        let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() < 1e-6;
        let all_near = found.len() == expected.len() && found.iter().zip(&expected).all(is_near);
        assert!(all_near, "{slots} slots: {found:?} for {expected:?}");
    }
}

/// Numbers in [-1, 1) that depend on `stream` alone.
fn numbers(stream: u64, len: usize) -> Vec<f32> {
    let seed = Seed::new(stream);
    let unit = |n| (seed.derive(n).as_u64() >> 40) as f32 / (1_u64 << 23) as f32;
    (0..len as u64).map(|n| unit(n) - 1.0).collect()
}

/// Rows of features, and a number to predict from each.
fn rows(step: u64) -> Result<(Tensor, Tensor)> {
    let x = Tensor::from_vec(numbers(step, ROWS * FEATURES), (ROWS, FEATURES), &Device::Cpu)?;
    let y = x.sum_keepdim(1)?.sin()?;
    Ok((x, y))
}

/// A network of two layers.
struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    #[expect(clippy::needless_pass_by_value, reason = "the signature of a model's constructor")]
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { up: linear(FEATURES, 16, vb.pp("up"))?, down: linear(16, 4, vb.pp("down"))? })
    }
}

#[test]
fn a_mean_over_tokens_counts_every_token_once() {
    const LENGTH: usize = 6;
    // The last row has no token, and with four devices it is alone on one of them.
    const TOKENS: [usize; ROWS] = [6, 1, 3, 5, 2, 4, 0];
    let batch = |step: u64| {
        let x = numbers(step, ROWS * LENGTH * FEATURES);
        let mut labels = [[0_i64, 1, 2, 3, 0, 1]; ROWS];
        for (row, tokens) in labels.iter_mut().zip(TOKENS) {
            row[tokens..].fill(-100);
        }
        let x = Tensor::from_vec(x, (ROWS, LENGTH, FEATURES), &Device::Cpu)?;
        Ok((x, Tensor::new(&labels, &Device::Cpu)?))
    };
    let loss = |_: &Replica, model: &Mlp, (x, labels): (Tensor, Tensor)| {
        let logits = model.down.forward(&model.up.forward(&x)?.tanh()?)?;
        let ignored = CrossEntropyConfig::default().with_ignore_index(-100);
        let tokens = ops::cross_entropy(&logits, &labels, &ignored)?;
        Ok(Loss::sum(tokens.sum, tokens.weight))
    };
    check(|slots| losses(slots, Uneven::Balanced, Mlp::new, batch, loss));
}

fn dropped(x: &Tensor, keys: &mut BatchKeys) -> Result<Tensor> {
    let key = keys.next_key(x)?;
    Ok(ops::dropout(x, 0.5, DropoutKey { seed: key.seed.as_u64(), call: 0, offset: key.offset })?)
}

#[test]
fn dropout_drops_the_same_on_any_number_of_devices() {
    let loss = |ctx: &Replica, model: &Mlp, (x, y): (Tensor, Tensor)| {
        let mut keys = ctx.batch_keys();
        let hidden = model.up.forward(&dropped(&x, &mut keys)?)?.tanh()?;
        let found = model.down.forward(&dropped(&hidden, &mut keys)?)?.sum_keepdim(1)?;
        // Four devices cut 7 rows into 2, 2, 2 and 1, or pad the last: only real rows count.
        let n_rows = ctx.valid_len().unwrap();
        Ok(Loss::mean(mse(&found.narrow(0, 0, n_rows)?, &y.narrow(0, 0, n_rows)?)?))
    };
    for uneven in [Uneven::Balanced, Uneven::Pad] {
        check(|slots| losses(slots, uneven, Mlp::new, rows, loss));
    }
}

#[test]
fn batch_norm_over_all_devices_is_that_of_one() {
    // A bias before the norm has no effect, so its gradient is rounding error alone, which Adam makes
    // as large as any other.
    let build = |vb: VarBuilder<'_>| {
        Ok((
            linear_no_bias(FEATURES, 16, vb.pp("up"))?,
            SyncBatchNorm::new(16, 1e-5, vb.pp("norm"))?,
            linear(16, 1, vb.pp("down"))?,
        ))
    };
    let loss = |ctx: &Replica,
                (up, norm, down): &(Linear, SyncBatchNorm, Linear),
                (x, y): (Tensor, Tensor)| {
        // The parameters of an evaluation are no variables.
        let train = up.weight().is_variable();
        let hidden = norm.forward_t(ctx, &up.forward(&x)?, train)?.tanh()?;
        Ok(Loss::mean(mse(&down.forward(&hidden)?, &y)?))
    };
    check(|slots| losses(slots, Uneven::Balanced, build, rows, loss));
}
