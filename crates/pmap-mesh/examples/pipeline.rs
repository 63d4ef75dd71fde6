//! A model in stages on different devices, kept busy with micro-batches.
//!
//! Each device along "stage" has one layer. The batch is cut into micro-batches; in every tick a
//! device runs its layer on one of them, and `ppermute` passes the results on. The pipeline fills,
//! runs, and drains, as in `GPipe` (arXiv 1811.06965):
//!
//! ```text
//! tick     0  1  2  3  4
//! stage 0  0  1  2  3  .
//! stage 1  .  0  1  2  3
//! ```
//!
//! The backward pass runs the same ticks in reverse: the transpose of `ppermute` is the inverse
//! permutation, so gradients move from stage to stage without extra code.
//!
//! All devices must call the same collectives in the same order, in `backward` too, so all of them
//! run the same graph. An idle device computes on its stale input, and a mask removes the result.
//! It must not skip the loss: then it would have no gradients to send, and the others would wait
//! for them.
//!
//! ```sh
//! cargo run --package pmap-mesh --example pipeline
//! ```

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use candle_core::{DType, Tensor, Var};
use candle_nn::loss::mse;
use core_types::Seed;
use pmap_mesh::{DeviceMesh, P, Replica};

const STAGES: usize = 2;
const MICRO_BATCHES: usize = 4;
const ROWS: usize = 8;
const WIDTH: usize = 16;
const LEARNING_RATE: f64 = 2.0;

fn main() -> Result<(), Box<dyn Error>> {
    pmap_mesh::init_threads(STAGES)?;
    let mesh = DeviceMesh::builder().axis("stage", STAGES).cpu()?;
    print_schedule(STAGES, MICRO_BATCHES);
    let (mut weights, x, y) = example(STAGES, MICRO_BATCHES)?;
    println!("\nstep  pipeline   one device  gradients apart");
    for step in 0..8 {
        let (loss, grads) = loss_and_grads(&mesh, &weights, &x, &y)?;
        let (serial_loss, serial_grads) = serial(&weights, &x, &y)?;
        println!(
            "{step:>4}  {loss:.7}  {serial_loss:.7}   {:.0e}",
            max_difference(&grads, &serial_grads)?
        );
        weights = (weights - grads * LEARNING_RATE)?;
    }
    Ok(())
}

/// Returns the micro-batch of a stage in a tick, if it has one.
fn active_micro_batch(stage: usize, tick: usize, micro_batches: usize) -> Option<usize> {
    tick.checked_sub(stage).filter(|&micro_batch| micro_batch < micro_batches)
}

fn n_ticks(stages: usize, micro_batches: usize) -> usize {
    micro_batches + stages - 1
}

fn print_schedule(stages: usize, micro_batches: usize) {
    for stage in 0..stages {
        let ticks = (0..n_ticks(stages, micro_batches))
            .map(|tick| active_micro_batch(stage, tick, micro_batches));
        let ticks: Vec<String> =
            ticks.map(|work| work.map_or(".".into(), |n| n.to_string())).collect();
        println!("stage {stage}: {}", ticks.join(" "));
    }
}

/// Returns mean loss and gradients of all micro-batches: `weights` [stages, width, width], `x` and
/// `y` [micro-batches, rows, width].
fn loss_and_grads(
    mesh: &DeviceMesh,
    weights: &Tensor,
    x: &Tensor,
    y: &Tensor,
) -> Result<(f32, Tensor), Box<dyn Error>> {
    let of_stage = P::shard(0, "stage");
    let step = mesh
        .pmap(replica)
        .in_axes([of_stage.clone(), P::replicate(), P::replicate()])
        .out_axes([P::replicate(), of_stage]);
    let (loss, grads) = step.call((weights.clone(), x.clone(), y.clone()))?;
    Ok((loss.to_scalar()?, grads))
}

/// Runs on each device: returns the loss, and the gradient of its layer.
fn replica(
    ctx: &Replica,
    (weight, x, y): (Tensor, Tensor, Tensor),
) -> candle_core::Result<(Tensor, Tensor)> {
    let weight = Var::from_tensor(&weight.squeeze(0)?)?;
    let loss = pipelined(ctx, &weight, &x, &y)?;
    let grads = loss.backward()?;
    let grad =
        grads.get(&weight).ok_or_else(|| candle_core::Error::msg("the layer is not used"))?;
    // The last stage has the loss, the others 0.
    Ok((ctx.psum(&loss.detach(), "stage")?, grad.unsqueeze(0)?))
}

/// Returns the mean loss on the last stage, and 0 on the others; the graph is the same on all.
fn pipelined(
    ctx: &Replica,
    weight: &Tensor,
    x: &Tensor,
    y: &Tensor,
) -> candle_core::Result<Tensor> {
    let (stage, stages, micro_batches) =
        (ctx.axis_index("stage")?, ctx.axis_size("stage")?, x.dim(0)?);
    let to_next: Vec<(usize, usize)> = (1..stages).map(|to| (to - 1, to)).collect();
    let is_first = mask(stage == 0, &x.get(0)?)?;
    let mut arrived = x.get(0)?.zeros_like()?;
    let mut losses = Vec::new();
    for tick in 0..n_ticks(stages, micro_batches) {
        let fresh = x.get(tick.min(micro_batches - 1))?;
        let result = is_first.where_cond(&fresh, &arrived)?.matmul(weight)?.tanh()?;
        if let Some(leaving) = active_micro_batch(stages - 1, tick, micro_batches) {
            losses.push(mse(&result, &y.get(leaving)?)?);
        }
        if tick + 1 < n_ticks(stages, micro_batches) {
            arrived = ctx.ppermute(&result, &to_next, "stage")?;
        }
    }
    let loss = Tensor::stack(&losses, 0)?.mean_all()?;
    // Multiply by a tensor: candle ends the graph at a number 0.
    let counts = mask(stage + 1 == stages, &loss)?.to_dtype(DType::F32)?;
    loss * counts
}

/// Returns ones in the shape of `like` if `on`, else zeros.
fn mask(on: bool, like: &Tensor) -> candle_core::Result<Tensor> {
    Tensor::full(u8::from(on), like.shape(), like.device())
}

/// Computes the same on one device, in plain candle, with the full batch.
fn serial(weights: &Tensor, x: &Tensor, y: &Tensor) -> candle_core::Result<(f32, Tensor)> {
    let weights = Var::from_tensor(weights)?;
    let mut hidden = x.flatten_to(1)?;
    for stage in 0..weights.dim(0)? {
        hidden = hidden.matmul(&weights.get(stage)?)?.tanh()?;
    }
    let loss = mse(&hidden, &y.flatten_to(1)?)?;
    let grads = loss.backward()?;
    let grad =
        grads.get(&weights).ok_or_else(|| candle_core::Error::msg("the layers are not used"))?;
    Ok((loss.to_scalar()?, grad.clone()))
}

/// Returns the largest difference between two tensors.
fn max_difference(left: &Tensor, right: &Tensor) -> candle_core::Result<f32> {
    (left - right)?.abs()?.max_all()?.to_scalar()
}

/// Returns the weights of all stages, and the inputs and targets of all micro-batches.
fn example(
    stages: usize,
    micro_batches: usize,
) -> Result<(Tensor, Tensor, Tensor), Box<dyn Error>> {
    let weights = (normal(0, (stages, WIDTH, WIDTH))? / (WIDTH as f64).sqrt())?;
    let x = normal(1, (micro_batches, ROWS, WIDTH))?;
    let y = normal(2, (micro_batches, ROWS, WIDTH))?.tanh()?;
    Ok((weights, x, y))
}

/// Returns numbers that depend only on the seed, from a replica's generator; candle's generator
/// cannot be seeded on a processor.
fn normal(seed: u64, shape: (usize, usize, usize)) -> pmap_mesh::Result<Tensor> {
    DeviceMesh::cpu(1)?.pmap(move |ctx, ()| ctx.rng().normal(shape)).seed(Seed::new(seed)).call(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_match_the_full_model() -> Result<(), Box<dyn Error>> {
        for (stages, micro_batches) in [(1, 2), (2, 1), (2, 4), (3, 2), (4, 5)] {
            let mesh = DeviceMesh::builder().axis("stage", stages).cpu()?;
            let (weights, x, y) = example(stages, micro_batches)?;
            let (loss, grads) = loss_and_grads(&mesh, &weights, &x, &y)?;
            let (expected, expected_grads) = serial(&weights, &x, &y)?;
            assert!((loss - expected).abs() < 1e-6, "{stages} stages: {loss} for {expected}");
            let difference = max_difference(&grads, &expected_grads)?;
            assert!(
                difference < 1e-6,
                "{stages} stages, {micro_batches} micro-batches: gradients are {difference} apart"
            );
        }
        Ok(())
    }

    #[test]
    fn micro_batches_visit_every_stage() {
        for (stages, micro_batches) in [(1, 1), (2, 4), (3, 2)] {
            for stage in 0..stages {
                let ticks = 0..n_ticks(stages, micro_batches);
                let visits: Vec<usize> = ticks
                    .filter_map(|tick| active_micro_batch(stage, tick, micro_batches))
                    .collect();
                assert_eq!(visits, (0..micro_batches).collect::<Vec<_>>());
            }
        }
    }
}
