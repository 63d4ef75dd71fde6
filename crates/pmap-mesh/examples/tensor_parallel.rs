//! A model cut along one axis of a mesh, and batches along the other: `data 2 x model 2`.
//!
//! The network is `mse(tanh(tanh(x · input) · up) · down, y)`. Rows of `x` and `y` are cut over
//! "data", columns of `up` and rows of `down` over "model". So each device computes half of the
//! hidden features of half of the rows. It needs no other device until the last product, of which
//! every device along "model" has a partial sum; `psum` adds them.
//!
//! The backward pass is the reverse. The sum is one value on all devices along "model", so its
//! gradient passes through `psum` unchanged. But `tanh(x · input)`, which is the same on all of
//! them too, was multiplied with different columns, so its gradients must be summed: `pvary` marks
//! that place. Without it the loss would be right and the gradient of `input` wrong, and different
//! on every device. (Megatron-LM, arXiv 1909.08053, calls the two operators g and f.)
//!
//! Gradients are averaged over "data", as in all data-parallel training; over "model" they need no
//! reduction.
//!
//! ```sh
//! cargo run --package pmap-mesh --example tensor_parallel
//! ```

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use candle_core::{Tensor, Var};
use candle_nn::loss::mse;
use core_types::Seed;
use pmap_mesh::{DeviceMesh, P, Replica};

const ROWS: usize = 16;
const FEATURES: usize = 6;
const WIDTH: usize = 8;
const HIDDEN: usize = 32;
const LEARNING_RATE: f64 = 0.1;

/// The matrices `input`, `up` and `down`.
type Params = (Tensor, Tensor, Tensor);

fn main() -> Result<(), Box<dyn Error>> {
    pmap_mesh::init_threads(4)?;
    let mesh = DeviceMesh::builder().axis("data", 2).axis("model", 2).cpu()?;
    println!("{mesh}");
    let (mut params, x, y) = (initial()?, normal(3, (ROWS, FEATURES))?, normal(4, (ROWS, 1))?);
    println!("step  mesh       one device  gradients apart");
    for step in 0..8 {
        let (loss, grads) = loss_and_grads(&mesh, &params, &x, &y)?;
        let (serial_loss, serial_grads) = serial(&params, &x, &y)?;
        println!(
            "{step:>4}  {loss:.7}  {serial_loss:.7}   {:.0e}",
            max_difference(&grads, &serial_grads)?
        );
        params = descend(&params, &grads)?;
    }
    Ok(())
}

/// Returns loss and gradients of the full batch, computed on `mesh`.
fn loss_and_grads(
    mesh: &DeviceMesh,
    params: &Params,
    x: &Tensor,
    y: &Tensor,
) -> Result<(f32, Params), Box<dyn Error>> {
    let (whole, columns, rows) = (P::replicate(), P::shard(1, "model"), P::shard(0, "model"));
    let batch = P::shard(0, "data");
    let step = mesh
        .pmap(replica)
        .in_axes([whole.clone(), columns.clone(), rows.clone(), batch.clone(), batch])
        .out_axes([P::replicate(), whole, columns, rows]);
    let (loss, grads) = step.call((params.clone(), x.clone(), y.clone()))?;
    Ok((loss.to_scalar()?, grads))
}

/// Runs on each device: returns the loss of the full batch, and the gradients of this device's
/// parts of the matrices.
fn replica(
    ctx: &Replica,
    ((input, up, down), x, y): (Params, Tensor, Tensor),
) -> candle_core::Result<(Tensor, Params)> {
    let vars = (Var::from_tensor(&input)?, Var::from_tensor(&up)?, Var::from_tensor(&down)?);
    let first = x.matmul(&vars.0)?.tanh()?;
    let hidden = ctx.pvary(&first, "model")?.matmul(&vars.1)?.tanh()?;
    let output = ctx.psum(&hidden.matmul(&vars.2)?, "model")?;
    let loss = mse(&output, &y)?;
    let grads = loss.backward()?;
    let mean = |var| ctx.pmean(gradient(&grads, var)?, "data");
    Ok((ctx.pmean(&loss.detach(), "data")?, (mean(&vars.0)?, mean(&vars.1)?, mean(&vars.2)?)))
}

/// Computes the same on one device, in plain candle.
fn serial(params: &Params, x: &Tensor, y: &Tensor) -> candle_core::Result<(f32, Params)> {
    let vars =
        (Var::from_tensor(&params.0)?, Var::from_tensor(&params.1)?, Var::from_tensor(&params.2)?);
    let hidden = x.matmul(&vars.0)?.tanh()?.matmul(&vars.1)?.tanh()?;
    let loss = mse(&hidden.matmul(&vars.2)?, y)?;
    let grads = loss.backward()?;
    let grad = |var| gradient(&grads, var).cloned();
    Ok((loss.to_scalar()?, (grad(&vars.0)?, grad(&vars.1)?, grad(&vars.2)?)))
}

fn gradient<'a>(
    grads: &'a candle_core::backprop::GradStore,
    var: &Var,
) -> candle_core::Result<&'a Tensor> {
    grads.get(var).ok_or_else(|| candle_core::Error::msg("a variable is not used"))
}

/// Returns the parameters after a step of gradient descent.
fn descend(params: &Params, grads: &Params) -> candle_core::Result<Params> {
    let step = |param: &Tensor, grad: &Tensor| param - (grad * LEARNING_RATE)?;
    Ok((step(&params.0, &grads.0)?, step(&params.1, &grads.1)?, step(&params.2, &grads.2)?))
}

/// Returns the largest difference between two sets of matrices.
fn max_difference(left: &Params, right: &Params) -> candle_core::Result<f32> {
    let difference =
        |left: &Tensor, right: &Tensor| (left - right)?.abs()?.max_all()?.to_scalar::<f32>();
    Ok(difference(&left.0, &right.0)?
        .max(difference(&left.1, &right.1)?)
        .max(difference(&left.2, &right.2)?))
}

fn initial() -> Result<Params, Box<dyn Error>> {
    let scaled = |seed, rows: usize, columns| normal(seed, (rows, columns))? / (rows as f64).sqrt();
    Ok((scaled(0, FEATURES, WIDTH)?, scaled(1, WIDTH, HIDDEN)?, scaled(2, HIDDEN, 1)?))
}

/// Returns numbers that depend only on the seed, from a replica's generator; candle's generator
/// cannot be seeded on a processor.
fn normal(seed: u64, shape: (usize, usize)) -> candle_core::Result<Tensor> {
    DeviceMesh::cpu(1)
        .and_then(|mesh: DeviceMesh| {
            mesh.pmap(move |ctx, ()| ctx.rng().normal(shape)).seed(Seed::new(seed)).call(())
        })
        .map_err(candle_core::Error::wrap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_match_the_full_model() -> Result<(), Box<dyn Error>> {
        let (mut params, x, y) = (initial()?, normal(3, (ROWS, FEATURES))?, normal(4, (ROWS, 1))?);
        for (data, model) in [(2, 2), (1, 4), (4, 1), (2, 4)] {
            let mesh = DeviceMesh::builder().axis("data", data).axis("model", model).cpu()?;
            let (loss, grads) = loss_and_grads(&mesh, &params, &x, &y)?;
            let (expected, expected_grads) = serial(&params, &x, &y)?;
            assert!((loss - expected).abs() < 1e-6, "{data} x {model}: {loss} for {expected}");
            let difference = max_difference(&grads, &expected_grads)?;
            assert!(difference < 1e-6, "{data} x {model}: gradients are {difference} apart");
            params = descend(&params, &grads)?;
        }
        Ok(())
    }

    #[test]
    fn losses_match_one_device() -> Result<(), Box<dyn Error>> {
        let mesh = DeviceMesh::builder().axis("data", 2).axis("model", 2).cpu()?;
        let (x, y) = (normal(3, (ROWS, FEATURES))?, normal(4, (ROWS, 1))?);
        let (mut here, mut there) = (initial()?, initial()?);
        let first = serial(&here, &x, &y)?.0;
        for _ in 0..20 {
            here = descend(&here, &loss_and_grads(&mesh, &here, &x, &y)?.1)?;
            there = descend(&there, &serial(&there, &x, &y)?.1)?;
        }
        assert!(max_difference(&here, &there)? < 1e-5);
        assert!(serial(&here, &x, &y)?.0 < first / 2.0);
        Ok(())
    }
}
