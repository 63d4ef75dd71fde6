//! A checkpoint changes no bit, runs its function twice, and leaves no variable without its
//! gradient.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore};
use candle_nn::{Module, VarBuilder, VarMap};
use fused_ops::{
    AttentionConfig, DropoutKey, Error, checkpoint, dropout,
    layers::{Attention, AttentionSizes, RmsNorm, SwiGlu, rms_norm},
};

use crate::support::{largest, numbers, values};

/// A block with randomness and twelve variables.
struct Block {
    norms: [RmsNorm; 2],
    attention: Attention,
    mlp: SwiGlu,
}

impl Block {
    fn new(vb: &VarBuilder<'_>) -> Result<Self> {
        let mut sizes = AttentionSizes::new(16, 4).with_key_heads(2);
        sizes.bias = true;
        Ok(Self {
            norms: [rms_norm(16, 1e-5, vb.pp("first"))?, rms_norm(16, 1e-5, vb.pp("second"))?],
            attention: Attention::new(sizes, &vb.pp("attention"))?,
            mlp: SwiGlu::new(16, 40, &vb.pp("mlp"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = self.norms[0].forward(x)?;
        let mixed = self.attention.forward(&normed, None, &AttentionConfig::causal())?;
        let mixed = dropout(&mixed, 0.2, DropoutKey { seed: 1, call: 4, offset: 0 })?;
        let (x, normed) = self.norms[1].forward_add(x, &mixed)?;
        x + self.mlp.forward(&normed)?
    }
}

fn block() -> Result<(Arc<Block>, Vec<Var>)> {
    let vars = VarMap::new();
    let block = Block::new(&VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    Ok((Arc::new(block), vars.all_vars()))
}

fn input() -> Result<Var> {
    Var::from_tensor(&numbers(&[2, 5, 16], 0).to_dtype(DType::F32)?)
}

fn backward(y: &Tensor) -> Result<GradStore> {
    y.sqr()?.sum_all()?.backward()
}

#[test]
fn recomputed_bits_are_equal() -> Result<()> {
    let ((block, vars), x) = (block()?, input()?);
    let plain = block.forward(&x)?;
    let inside = Arc::clone(&block);
    let y = checkpoint(&vars, &x, move |x| inside.forward(x))?;
    assert_eq!(values(&y), values(&plain));

    let (expected, found) = (backward(&plain)?, backward(&y)?);
    assert_eq!(vars.len(), 12);
    for var in vars.iter().chain([&x]) {
        let [expected, found] =
            [&expected, &found].map(|grads| grads.get(var).expect("it has one"));
        assert_eq!(values(found), values(expected));
    }
    Ok(())
}

#[test]
fn checkpoints_chain_and_nest() -> Result<()> {
    let ((block, vars), x) = (block()?, input()?);
    let plain = block.forward(&block.forward(&x)?)?;
    let (outer, inner, inside) = (Arc::clone(&block), Arc::clone(&block), vars.clone());
    let first = checkpoint(&vars, &x, move |x| {
        let block = Arc::clone(&inner);
        Ok(checkpoint(&inside, x, move |x| block.forward(x))?)
    })?;
    let y = checkpoint(&vars, &first, move |x| outer.forward(x))?;
    assert_eq!(values(&y), values(&plain));
    let (expected, found) = (backward(&plain)?, backward(&y)?);
    for var in vars.iter().chain([&x]) {
        // The two uses of a variable are added in another order.
        let [expected, found] =
            [&expected, &found].map(|grads| grads.get(var).expect("it has one"));
        assert!(largest(&(expected - found)?)? <= 1e-5 * largest(expected)?);
    }
    Ok(())
}

#[test]
fn function_runs_once_per_pass() -> Result<()> {
    let (weight, x) = (Var::new(3.0, &Device::Cpu)?, Var::new(&[1.0, 2.0], &Device::Cpu)?);
    let runs = Arc::new(AtomicUsize::new(0));
    let (counter, inside) = (Arc::clone(&runs), weight.clone());
    let y = checkpoint(std::slice::from_ref(&weight), &x, move |x| {
        counter.fetch_add(1, Ordering::Relaxed);
        x.broadcast_mul(&inside)
    })?;
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    y.sum_all()?.backward()?;
    assert_eq!(runs.load(Ordering::Relaxed), 2);
    Ok(())
}

#[test]
fn undeclared_variable_is_rejected() -> Result<()> {
    let (weight, x) = (Var::new(3.0, &Device::Cpu)?, Var::new(&[1.0, 2.0], &Device::Cpu)?);
    let inside = weight.clone();
    let error = checkpoint(&[], &x, move |x| x.broadcast_mul(&inside)).unwrap_err();
    assert!(matches!(error, Error::Gradient { cure, .. } if cure.contains("of shape []")));
    // Variables that would get no gradient may be detached.
    let inside = weight.detach();
    checkpoint(&[], &x, move |x| x.broadcast_mul(&inside))?;
    Ok(())
}

#[test]
fn duplicate_and_unused_vars_are_handled() -> Result<()> {
    let (weight, unused) = (Var::new(3.0, &Device::Cpu)?, Var::new(&[5.0], &Device::Cpu)?);
    let x = Tensor::new(&[1.0, 2.0], &Device::Cpu)?;
    let (vars, inside) = ([weight.clone(), unused.clone(), weight.clone()], weight.clone());
    let y = checkpoint(&vars, &x, move |x| x.broadcast_mul(&inside))?;
    let grads = y.sum_all()?.backward()?;
    assert_eq!(grads.get(&weight).expect("it has one").to_scalar::<f64>()?, 3.0);
    assert_eq!(grads.get(&unused).expect("it has one").to_vec1::<f64>()?, [0.0]);
    assert!(grads.get(&x).is_none());
    Ok(())
}

#[test]
fn untracked_result_has_no_history() -> Result<()> {
    let x = Tensor::new(&[1.0, 2.0], &Device::Cpu)?;
    assert!(!checkpoint(&[], &x, Tensor::sqr)?.track_op());
    Ok(())
}

#[test]
fn failure_in_backward_is_an_error() -> Result<()> {
    let x = Var::new(&[1.0, 2.0], &Device::Cpu)?;
    let runs = AtomicUsize::new(0);
    let y = checkpoint(&[], &x, move |x| match runs.fetch_add(1, Ordering::Relaxed) {
        0 => x.sqr(),
        _ => Err(candle_core::Error::msg("the second time")),
    })?;
    let error = y.sum_all()?.backward().map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("the second time"));
    Ok(())
}
