//! Shows what candle's backward pass spends on zeros: it adds the first gradient of every tensor to a
//! tensor of zeros. All times but the last are those of candle's operations.
//!
//! ```console
//! cargo run --release -p fused-ops --example first_gradients
//! ```

#![allow(clippy::print_stdout, reason = "the times are the result")]

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor, Var};

const LAYERS: usize = 8;
const WIDTH: usize = 1024;

/// Few rows, as in fine-tuning with short texts, so that weights are larger than what passes through.
const ROWS: usize = 32;

/// Returns the least time of ten calls.
fn least<T>(mut call: impl FnMut() -> Result<T>) -> Result<Duration> {
    let mut times = Vec::new();
    for _ in 0..10 {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed());
    }
    Ok(times.into_iter().min().unwrap_or_default())
}

fn main() -> Result<()> {
    let device = Device::Cpu;
    let x = Tensor::ones((ROWS, WIDTH), DType::F32, &device)?;
    let scale = 1.0 / WIDTH as f64;
    let weights: Vec<Var> = (0..LAYERS)
        .map(|_| Var::from_tensor(&Tensor::randn(0_f32, 1.0, (WIDTH, WIDTH), &device)?))
        .collect::<Result<_>>()?;
    let loss =
        weights.iter().try_fold(x.clone(), |y, w| y.matmul(w)?.affine(scale, 0.0))?.sum_all()?;
    let backward = least(|| loss.backward())?;

    // The arithmetic of the gradients: two products a layer. Results are kept to the end, as in a pass.
    let products = least(|| {
        let products = weights.iter().map(|w| Ok((x.matmul(&w.t()?)?, x.t()?.matmul(&x)?)));
        products.collect::<Result<Vec<_>>>()
    })?;
    let zeros =
        least(|| weights.iter().map(|w| w.zeros_like()?.add(w)).collect::<Result<Vec<_>>>())?;
    println!(
        "candle's backward: {backward:.1?}; its products: {products:.1?}; zeros and sums: {zeros:.1?}"
    );

    let direct = |y: Tensor, w: &Var| fused_ops::linear(&y, w, None, None)?.affine(scale, 0.0);
    let loss = weights.iter().try_fold(x.clone(), direct)?.sum_all()?;
    let variables = || weights.iter().map(Var::as_tensor);
    let ours = least(|| fused_ops::with_direct_grads(variables(), || loss.backward()))?;
    println!("with fused_ops::linear and with_direct_grads: {ours:.1?}");
    Ok(())
}
