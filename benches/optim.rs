//! Optimizer steps on 7.4 million parameters, ours and candle's. `peers/torch_optim.py` measures
//! PyTorch's with the same shapes.

use std::time::Duration;

use benches::is_test;
use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore};
use candle_distributed::{
    mesh::keep_freed_memory,
    train::{AdamW, ParamsSgd, Sgd},
};
use candle_nn::{Optimizer, ParamsAdamW, SGD};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Returns the shapes of a transformer with 8 blocks, 1 in a test, of width 256 over 2,048 tokens.
fn shapes() -> Vec<Vec<usize>> {
    let mut shapes = vec![vec![2048, 256], vec![2048, 256], vec![256]];
    for _ in 0..if is_test() { 1 } else { 8 } {
        shapes.extend([vec![768, 256], vec![256, 256], vec![1024, 256], vec![256, 1024]]);
        shapes.extend([vec![256], vec![256]]);
    }
    shapes
}

/// Returns variables and gradients. With `transposed`, the gradients of matrices are transposed
/// views, like the ones that candle's `Linear` gets.
fn variables(dtype: DType, transposed: bool) -> Result<(Vec<Var>, GradStore)> {
    let mut grads = GradStore::default();
    let mut vars = Vec::new();
    for shape in shapes() {
        let len: usize = shape.iter().product();
        let numbers: Vec<f32> = (0..len).map(|item| (item as f32 * 0.7).sin()).collect();
        let numbers = Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(dtype)?;
        let var = Var::from_tensor(&numbers)?;
        let grad =
            if transposed && var.rank() == 2 { numbers.t()?.contiguous()?.t()? } else { numbers };
        grads.insert(&var, grad);
        vars.push(var);
    }
    Ok((vars, grads))
}

/// Times the steps of an optimizer, and checks that they change the variables.
fn time<O: Optimizer>(
    c: &mut Criterion,
    name: &str,
    library: &str,
    (vars, grads): (Vec<Var>, GradStore),
    make: impl FnOnce(Vec<Var>) -> Result<O>,
) -> Result<()> {
    let n_items: usize = vars.iter().map(|var| var.elem_count()).sum();
    let first = vars[0].clone();
    let initial = first.copy()?;
    let mut optimizer = make(vars)?;
    let mut group = c.benchmark_group("optim");
    group.sample_size(10).measurement_time(Duration::from_secs(1));
    group.warm_up_time(Duration::from_millis(300)).throughput(Throughput::Elements(n_items as u64));
    let id = BenchmarkId::new(name, library);
    let mut is_run = false;
    group.bench_function(id, |b| {
        is_run = true;
        b.iter(|| optimizer.step(&grads));
    });
    group.finish();
    if !is_run {
        // The command line selects another bench.
        return Ok(());
    }
    let change = (first.as_tensor() - initial)?.abs()?.sum_all()?;
    assert!(
        change.to_dtype(DType::F32)?.to_scalar::<f32>()? > 0.0,
        "{name}/{library} changes nothing"
    );
    Ok(())
}

fn adamw(c: &mut Criterion) -> Result<()> {
    let params = ParamsAdamW { lr: 1e-5, ..ParamsAdamW::default() };
    for (name, dtype, transposed) in [
        ("adamw_f32", DType::F32, false),
        ("adamw_f32_transposed", DType::F32, true),
        ("adamw_bf16", DType::BF16, false),
    ] {
        let ours = |vars| AdamW::new(vars, params.clone());
        time(c, name, "ours", variables(dtype, transposed)?, ours)?;
        let candles = |vars| candle_nn::AdamW::new(vars, params.clone());
        time(c, name, "candle", variables(dtype, transposed)?, candles)?;
    }
    Ok(())
}

fn sgd(c: &mut Criterion) -> Result<()> {
    let plain = ParamsSgd { lr: 1e-5, ..ParamsSgd::default() };
    let momentum = ParamsSgd { momentum: 0.9, ..plain.clone() };
    let make = |vars| Sgd::new(vars, momentum);
    time(c, "sgd_momentum_f32", "ours", variables(DType::F32, false)?, make)?;
    let make = |vars| Sgd::new(vars, plain);
    time(c, "sgd_f32", "ours", variables(DType::F32, false)?, make)?;
    let make = |vars| SGD::new(vars, 1e-5);
    time(c, "sgd_f32", "candle", variables(DType::F32, false)?, make)
}

#[expect(clippy::expect_used, reason = "a benchmark fails by panicking")]
fn optimizers(c: &mut Criterion) {
    keep_freed_memory();
    adamw(c).and_then(|()| sgd(c)).expect("the optimizers step");
}

criterion_group!(benches, optimizers);
criterion_main!(benches);
