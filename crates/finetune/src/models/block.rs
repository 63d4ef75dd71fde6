//! A block of a decoder: attention and a gated feed-forward network, each added to its input.

use candle_core::{D, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use fused_ops::{
    Activation, geglu,
    layers::{Linear, RmsNorm, SwiGlu},
    swiglu,
};

use crate::models::{
    attention::Attention,
    config::DecoderConfig,
    experts::Experts,
    layers::{linear, norm},
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
                PassKind::Token => norm.forward_add(&kind.project(attended, &[output])?[0], x),
            },
            before_mlp => {
                let added = kind.project(attended, &[output])?.swap_remove(0);
                let x = self.add(x, self.after_attention.as_ref(), &added)?;
                let normed = apply(before_mlp.as_ref(), &x)?;
                Ok((x, normed))
            }
        }
    }

    /// Returns the sum of `x` and the result of the feed-forward network.
    fn add_mlp(&self, x: &Tensor, normed: &Tensor, kind: PassKind) -> Result<Tensor> {
        match &self.mlp.layers {
            MlpLayers::Separate(mlp)
                if kind == PassKind::Rows && self.after_mlp.is_none() && self.adds_unscaled() =>
            {
                mlp.forward_add(normed, x)
            }
            _ => self.add(x, self.after_mlp.as_ref(), &self.mlp.forward(normed, kind)?),
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
struct Mlp {
    layers: MlpLayers,
    activation: Activation,
}

#[derive(Debug)]
enum MlpLayers {
    /// Gate and up are two layers.
    Separate(SwiGlu),
    /// Gate and up are one layer, with the rows of the gate first.
    Together {
        gate_up: Linear,
        down: Linear,
    },
    Experts(Experts),
}

impl Mlp {
    fn new(config: &DecoderConfig, layer: usize, vb: &VarBuilder<'_>) -> Result<Self> {
        let activation = config.activation;
        if let Some(experts) = config.experts.filter(|_| config.layers[layer].has_experts) {
            let experts = Experts::new(config, &experts, &vb.pp(experts.part()))?;
            return Ok(Self { layers: MlpLayers::Experts(experts), activation });
        }
        let vb = &vb.pp(MLP);
        let down = linear(config.down(), vb)?;
        let layers = match config.gates()[..] {
            [gate, up] => {
                let mlp = SwiGlu::from_layers([linear(gate, vb)?, linear(up, vb)?, down]);
                MlpLayers::Separate(mlp.with_activation(activation))
            }
            _ => MlpLayers::Together { gate_up: linear(config.gates()[0], vb)?, down },
        };
        Ok(Self { layers, activation })
    }

    fn forward(&self, x: &Tensor, kind: PassKind) -> Result<Tensor> {
        let (gate, up, down) = match &self.layers {
            MlpLayers::Separate(mlp) if kind == PassKind::Rows => return mlp.forward(x),
            MlpLayers::Experts(experts) => return experts.forward(x),
            MlpLayers::Separate(mlp) => {
                let [gate, up, down] = mlp.layers();
                let mut projected = kind.project(x, &[gate, up])?;
                let up = projected.swap_remove(1);
                (projected.swap_remove(0), up, down)
            }
            MlpLayers::Together { gate_up, down } => {
                let projected = kind.project(x, &[gate_up])?.swap_remove(0);
                let width = projected.dim(D::Minus1)? / 2;
                let part = |start| projected.narrow(D::Minus1, start, width);
                (part(0)?, part(width)?, down)
            }
        };
        Ok(kind.project(&gated(self.activation, &gate, &up)?, &[down])?.swap_remove(0))
    }
}

/// Returns activation(gate) · up.
fn gated(activation: Activation, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    Ok(match activation {
        Activation::GeluTanh => geglu(gate, up)?,
        _ => swiglu(gate, up)?,
    })
}
