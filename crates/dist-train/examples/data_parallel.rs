//! Trains the same model on one and on two devices, and compares the losses.
//!
//! `DataParallel` keeps a replica of the model on every device of a mesh. A step splits the batch
//! by rows, each device differentiates the loss of its rows, the gradients are all-reduced, and the
//! optimizers update the variables. This example uses two virtual devices on the CPU; for two GPUs,
//! create the mesh with `DeviceMesh::cuda(2)` and the variables on the first.
//!
//! An epoch of 101 rows in batches of 32 ends with 5 rows, which do not divide evenly.
//! `Uneven::Balanced` gives the devices 3 and 2 rows and weights their gradients accordingly, so
//! the last batch needs no padding and loses no row.
//!
//! ```sh
//! cargo run --package dist-train --example data_parallel
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::{collections::BTreeMap, error::Error, process};

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, linear, loss::mse};
use core_types::Seed;
use dist_train::DataParallel;
use pmap_mesh::{DeviceMesh, Replica, Uneven};

const ROWS: usize = 101;
const BATCH_ROWS: usize = 32;
const FEATURES: usize = 4;
const HIDDEN: usize = 32;
const EPOCHS: usize = 10;
const MAX_NORM: f64 = 1.0;

type Batch = (Tensor, Tensor);

fn main() {
    if let Err(error) = run() {
        eprintln!("error: {error}");
        process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    pmap_mesh::init_threads(2)?;
    let data = data_set()?;
    let one = train(1, &data)?;
    let two = train(2, &data)?;
    println!(
        "mean loss of an epoch of {ROWS} rows in batches of {BATCH_ROWS}, the last batch of {}",
        ROWS % BATCH_ROWS
    );
    println!("epoch  1 device    2 devices   difference");
    for (epoch, (one, two)) in one.iter().zip(&two).enumerate() {
        println!("{epoch:>5}  {one:.7}  {two:.7}  {:.0e}", (one - two).abs());
    }
    Ok(())
}

#[derive(Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    #[allow(clippy::needless_pass_by_value, reason = "`DataParallel` requires this signature")]
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self {
            up: linear(FEATURES, HIDDEN, vb.pp("up"))?,
            down: linear(HIDDEN, 1, vb.pp("down"))?,
        })
    }

    fn loss(&self, (x, y): &Batch) -> candle_core::Result<Tensor> {
        mse(&self.down.forward(&self.up.forward(x)?.tanh()?)?, y)
    }
}

/// Returns the mean loss of each epoch on a mesh of `slots` devices.
fn train(slots: usize, data: &Batch) -> Result<Vec<f64>, Box<dyn Error>> {
    let mesh = DeviceMesh::cpu(slots)?;
    let initial = initial()?;
    let mut model = DataParallel::builder(&mesh, Mlp::new)
        .init_with(move |declared, items| {
            initial[&declared.name].flatten_all()?.narrow(0, items.start, items.len())
        })
        .uneven(Uneven::Balanced)
        .clip_grad_norm(MAX_NORM)
        .build(|group| adam(group.vars))?;
    let loss = |_: &Replica, model: &Mlp, batch: Batch| model.loss(&batch);
    epochs(data, |batch| Ok(model.step(batch, loss)?.loss))
}

/// Passes all batches to `step`, which returns their mean losses, and returns the mean loss of each
/// epoch.
fn epochs(
    (x, y): &Batch,
    mut step: impl FnMut(Batch) -> Result<f64, Box<dyn Error>>,
) -> Result<Vec<f64>, Box<dyn Error>> {
    let mut epoch = || {
        let mut sum = 0.0;
        for start in (0..ROWS).step_by(BATCH_ROWS) {
            let rows = BATCH_ROWS.min(ROWS - start);
            sum += step((x.narrow(0, start, rows)?, y.narrow(0, start, rows)?))? * rows as f64;
        }
        Ok(sum / ROWS as f64)
    };
    (0..EPOCHS).map(|_| epoch()).collect()
}

fn adam(vars: Vec<Var>) -> candle_core::Result<AdamW> {
    AdamW::new(vars, ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() })
}

/// Returns rows of normal numbers and a smooth function of each row.
fn data_set() -> Result<Batch, Box<dyn Error>> {
    let x = normal(0, (ROWS, FEATURES))?;
    let y = x.sum_keepdim(1)?.sin()?;
    Ok((x, y))
}

/// Returns the initial values by name, the same for every run.
fn initial() -> Result<BTreeMap<String, Tensor>, Box<dyn Error>> {
    let values = [
        ("up.weight", (normal(1, (HIDDEN, FEATURES))? * 0.5)?),
        ("up.bias", normal(2, (1, HIDDEN))?.squeeze(0)?),
        ("down.weight", (normal(3, (1, HIDDEN))? * 0.2)?),
        ("down.bias", Tensor::zeros(1, DType::F32, &Device::Cpu)?),
    ];
    Ok(values.map(|(name, value)| (name.to_owned(), value)).into())
}

/// Draws numbers that depend on the seed alone from a replica's generator; candle's own CPU
/// generator cannot be seeded.
fn normal(seed: u64, shape: (usize, usize)) -> pmap_mesh::Result<Tensor> {
    DeviceMesh::cpu(1)?.pmap(move |ctx, ()| ctx.rng().normal(shape)).seed(Seed::new(seed)).call(())
}

#[cfg(test)]
#[expect(clippy::disallowed_types, reason = "candle takes tensors in a HashMap")]
mod tests {
    use std::collections::HashMap;

    use candle_core::backprop::GradStore;

    use super::*;

    /// Trains with candle alone.
    fn train_serially(data: &Batch) -> Result<Vec<f64>, Box<dyn Error>> {
        let mut vars = Vec::new();
        let mut named = HashMap::new();
        for (name, value) in initial()? {
            let var = Var::from_tensor(&value)?;
            named.insert(name, var.as_tensor().clone());
            vars.push(var);
        }
        let model = Mlp::new(VarBuilder::from_tensors(named, DType::F32, &Device::Cpu))?;
        let mut optimizer = adam(vars.clone())?;
        epochs(data, |batch| {
            let loss = model.loss(&batch)?;
            let mut grads = loss.backward()?;
            clip(&mut grads, &vars)?;
            optimizer.step(&grads)?;
            Ok(f64::from(loss.to_scalar::<f32>()?))
        })
    }

    /// Scales gradients down if their joint norm is above the limit.
    fn clip(grads: &mut GradStore, vars: &[Var]) -> candle_core::Result<()> {
        let mut all = Vec::with_capacity(vars.len());
        for var in vars {
            let grad = grads.get(var).cloned();
            all.push(grad.ok_or_else(|| candle_core::Error::msg("a variable has no gradient"))?);
        }
        let squares = all.iter().map(|grad| grad.sqr()?.sum_all()?.to_scalar::<f32>());
        let norm = squares.sum::<candle_core::Result<f32>>()?.sqrt();
        let factor = (MAX_NORM / f64::from(norm)).min(1.0);
        for (var, grad) in vars.iter().zip(all) {
            grads.insert(var, (grad * factor)?);
        }
        Ok(())
    }

    #[test]
    fn losses_match_candle_alone() -> Result<(), Box<dyn Error>> {
        let data = data_set()?;
        let expected = train_serially(&data)?;
        assert!(expected[EPOCHS - 1] < expected[0] / 2.0, "{expected:?}");
        for slots in 1..=4 {
            for (epoch, (loss, expected)) in train(slots, &data)?.iter().zip(&expected).enumerate()
            {
                assert!(
                    (loss - expected).abs() < 1e-5,
                    "{slots} devices, epoch {epoch}: {loss} instead of {expected}"
                );
            }
        }
        Ok(())
    }
}
