//! A block of a decoder: attention and a gated feed-forward network, each added to its input.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};
use fused_ops::{
    Activation, geglu,
    layers::{RmsNorm, SwiGlu},
    swiglu,
};

use crate::models::{
    attention::Attention,
    config::DecoderConfig,
    experts::Experts,
    layers::{linear, linears, norm},
    names::MLP,
    pass::{Pass, PassKind},
};

#[derive(Debug)]
pub(super) struct Block {
    before_attention: Option<RmsNorm>,
    attention: Attention,
    after_attention: Option<RmsNorm>,
    before_mlp: Option<RmsNorm>,
    mlp: Mlp,
    after_mlp: Option<RmsNorm>,
    residual_scale: f64,
}

impl Block {
    /// Builds the block of a layer from the variables below its name.
    pub(super) fn new(config: &DecoderConfig, layer: usize, vb: &VarBuilder<'_>) -> Result<Self> {
        let names = config.norms.names();
        let norm = |name: Option<&str>| {
            name.map(|name| norm(config, config.hidden_size, &vb.pp(name))).transpose()
        };
        Ok(Self {
            before_attention: norm(names.before_attention)?,
            attention: Attention::new(config, layer, vb)?,
            after_attention: norm(names.after_attention)?,
            before_mlp: norm(names.before_mlp)?,
            mlp: Mlp::new(config, layer, vb)?,
            after_mlp: norm(names.after_mlp)?,
            residual_scale: config.residual_scale,
        })
    }

    /// Applies the block to `x` [rows, length, hidden].
    pub(super) fn forward(&self, x: &Tensor, mut pass: Pass<'_>) -> Result<Tensor> {
        let normed = apply(self.before_attention.as_ref(), x)?;
        let attended = self.attention.attend(&normed, &mut pass)?;
        let (x, normed) = self.add_attention(x, &attended, pass.kind)?;
        self.add_mlp(&x, &normed, pass.kind)
    }

    /// Returns the sum of `x` and what attention adds to it, and the input of the feed-forward network.
    fn add_attention(
        &self,
        x: &Tensor,
        attended: &Tensor,
        kind: PassKind,
    ) -> Result<(Tensor, Tensor)> {
        let output = &self.attention.output;
        match &self.before_mlp {
            Some(norm) if self.after_attention.is_none() && self.adds_unscaled() => match kind {
                PassKind::Rows => output.forward_add_norm(attended, x, norm),
                PassKind::Token => {
                    let [added] = kind.project(attended, [output])?;
                    norm.forward_add(&added, x)
                }
            },
            before_mlp => {
                let [added] = kind.project(attended, [output])?;
                let x = self.add(x, self.after_attention.as_ref(), &added)?;
                let normed = apply(before_mlp.as_ref(), &x)?;
                Ok((x, normed))
            }
        }
    }

    /// Returns the sum of `x` and the result of the feed-forward network.
    fn add_mlp(&self, x: &Tensor, normed: &Tensor, kind: PassKind) -> Result<Tensor> {
        match &self.mlp {
            Mlp::Gated(mlp)
                if kind == PassKind::Rows && self.after_mlp.is_none() && self.adds_unscaled() =>
            {
                mlp.forward_add(normed, x)
            }
            mlp => self.add(x, self.after_mlp.as_ref(), &mlp.forward(normed, kind)?),
        }
    }

    /// Returns `x` + scale · norm(`added`).
    fn add(&self, x: &Tensor, norm: Option<&RmsNorm>, added: &Tensor) -> Result<Tensor> {
        let added = apply(norm, added)?;
        if self.adds_unscaled() { x + added } else { x + (added * self.residual_scale)? }
    }

    #[expect(clippy::float_cmp, reason = "only a factor of exactly 1 changes nothing")]
    fn adds_unscaled(&self) -> bool {
        self.residual_scale == 1.
    }
}

/// Applies a norm, if there is one.
fn apply(norm: Option<&RmsNorm>, x: &Tensor) -> Result<Tensor> {
    norm.map_or_else(|| Ok(x.clone()), |norm| norm.forward(x))
}

/// A gated feed-forward network, or several.
#[derive(Debug)]
enum Mlp {
    Gated(SwiGlu),
    Experts(Experts),
}

impl Mlp {
    fn new(config: &DecoderConfig, layer: usize, vb: &VarBuilder<'_>) -> Result<Self> {
        if let Some(experts) = config.experts.filter(|_| config.layers[layer].has_experts) {
            let vb = vb.pp(experts.part());
            return Ok(Self::Experts(Experts::new(config, &experts, &vb)?));
        }
        let vb = &vb.pp(MLP);
        let [gate, up] = linears(config.gates(), [config.intermediate_size; 2], vb)?;
        let mlp = SwiGlu::from_layers([gate, up, linear(config.down(), vb)?]);
        Ok(Self::Gated(mlp.with_activation(config.activation)))
    }

    fn forward(&self, x: &Tensor, kind: PassKind) -> Result<Tensor> {
        match self {
            Self::Gated(mlp) if kind == PassKind::Rows => mlp.forward(x),
            Self::Gated(mlp) => {
                let [gate, up, down] = mlp.layers();
                let [gate, up] = kind.project(x, [gate, up])?;
                let [result] = kind.project(&gated(mlp.activation(), &gate, &up)?, [down])?;
                Ok(result)
            }
            Self::Experts(experts) => experts.forward(x),
        }
    }
}

/// Returns activation(gate) · up.
fn gated(activation: Activation, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    Ok(match activation {
        Activation::GeluTanh => geglu(gate, up)?,
        _ => swiglu(gate, up)?,
    })
}
