//! Layers have candle-nn's parameters and results, and a gradient for each parameter.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder, VarMap};
use fused_ops::{Activation, CrossEntropyConfig, cross_entropy, layers};

use crate::support::{largest, numbers};

/// Builds a layer on fresh variables, and again on the same; checks names, results and gradients.
fn check<A: Module, B: Module>(
    x: &Tensor,
    ours: impl Fn(VarBuilder<'_>) -> Result<A>,
    theirs: impl Fn(VarBuilder<'_>) -> Result<B>,
) -> Result<()> {
    let (vars, other) = (VarMap::new(), VarMap::new());
    let build = |vars| VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu).pp("layer");
    let layer = ours(build(&vars))?;
    theirs(build(&other))?;
    assert_eq!(names(&vars), names(&other));

    let (found, expected) = (layer.forward(x)?, theirs(build(&vars))?.forward(x)?);
    let off = largest(&(&found - &expected)?)?;
    assert!(off < 1e-5, "{off}");
    let grads = found.sqr()?.sum_all()?.backward()?;
    assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
    Ok(())
}

/// Returns the names and shapes of all variables.
fn names(vars: &VarMap) -> Vec<(String, Vec<usize>)> {
    let vars = vars.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut names: Vec<_> =
        vars.iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect();
    names.sort();
    names
}

fn input() -> Result<Tensor> {
    numbers(&[2, 3, 8], 0).to_dtype(DType::F32)
}

#[test]
fn norms() -> Result<()> {
    let x = &input()?;
    check(x, |vb| layers::rms_norm(8, 1e-6, vb), |vb| candle_nn::rms_norm(8, 1e-6, vb))?;
    check(x, |vb| layers::layer_norm(8, 1e-6, vb), |vb| candle_nn::layer_norm(8, 1e-6, vb))?;
    // Without its mean, but with a bias.
    let config = candle_nn::LayerNormConfig { eps: 1e-6, remove_mean: false, affine: true };
    check(x, |vb| layers::layer_norm(8, config, vb), |vb| candle_nn::layer_norm(8, config, vb))
}

#[test]
fn linear() -> Result<()> {
    let x = &input()?;
    check(x, |vb| layers::linear(8, 5, vb), |vb| candle_nn::linear(8, 5, vb))?;
    check(x, |vb| layers::linear_no_bias(8, 5, vb), |vb| candle_nn::linear_no_bias(8, 5, vb))
}

#[test]
fn embedding() -> Result<()> {
    let ids = Tensor::new(&[[0_u32, 4, 4], [2, 1, 0]], &Device::Cpu)?;
    check(&ids, |vb| layers::embedding(5, 8, vb), |vb| candle_nn::embedding(5, 8, vb))
}

#[test]
fn llama_parameters_have_their_names() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let mut sizes = layers::AttentionSizes::new(8, 4).with_key_heads(2);
    sizes.head_size = 6;
    let attention = layers::Attention::new(sizes, &vb.pp("self_attn"))?;
    let mlp = layers::SwiGlu::new(8, 20, &vb.pp("mlp"))?;
    let expected = [
        ("mlp.down_proj.weight", vec![8, 20]),
        ("mlp.gate_proj.weight", vec![20, 8]),
        ("mlp.up_proj.weight", vec![20, 8]),
        ("self_attn.k_proj.weight", vec![12, 8]),
        ("self_attn.o_proj.weight", vec![8, 24]),
        ("self_attn.q_proj.weight", vec![24, 8]),
        ("self_attn.v_proj.weight", vec![12, 8]),
    ];
    assert_eq!(names(&vars), expected.map(|(name, shape)| (name.to_owned(), shape)));

    let x = input()?;
    let angles = (Tensor::ones((3, 3), DType::F32, &Device::Cpu)? * 0.5)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let config = fused_ops::AttentionConfig::causal();
    let y = mlp.forward(&attention.forward(&x, Some((&cos, &sin)), &config)?)?;
    let grads = y.sqr()?.sum_all()?.backward()?;
    assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
    Ok(())
}

#[test]
fn head_loss_counts_adapter_bias_and_activation() -> Result<()> {
    let [weight, a, b] = [[5, 8], [2, 8], [5, 2]].map(|shape| numbers(&shape, 3));
    let plain = layers::Linear::new(weight.clone(), None);
    let heads = [
        plain.clone(),
        plain.clone().with_adapter(&a, &b, 0.5),
        plain.with_activation(Activation::Gelu),
        layers::Linear::new(weight, Some(numbers(&[5], 4))),
    ];
    let targets = Tensor::new(&[[0_u32, 1, 2], [3, 4, 0]], &Device::Cpu)?;
    let x = numbers(&[2, 3, 8], 1);
    let config = CrossEntropyConfig::default();
    for head in heads {
        let found = head.cross_entropy(&x, &targets, &config)?.sum.to_scalar::<f64>()?;
        let logits = head.forward(&x)?;
        let expected = cross_entropy(&logits, &targets, &config)?.sum.to_scalar::<f64>()?;
        assert!((found - expected).abs() < 1e-12, "{found}, {expected}");
    }
    Ok(())
}
