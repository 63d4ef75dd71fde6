//! The gated feed-forward network.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::linear::{Linear, linear_no_bias};
use crate::{config::Activation, ops::swiglu_mlp};

/// [`swiglu_mlp`](crate::swiglu_mlp()), with the parameter names of Llama and its relatives: `gate_proj`,
/// `up_proj` and `down_proj`. The gate may have another [activation](Self::with_activation).
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use fused_ops::layers::SwiGlu;
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let mlp = SwiGlu::new(8, 32, &vb.pp("mlp"))?;
/// let x = Tensor::ones((1, 3, 8), DType::F32, &Device::Cpu)?;
/// assert_eq!(mlp.forward(&x)?.dims(), [1, 3, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct SwiGlu {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Activation,
}

impl SwiGlu {
    /// Loads a network of this width without biases, or initializes it as candle-nn does.
    ///
    /// # Errors
    ///
    /// Returns an error if a weight cannot be loaded.
    pub fn new(hidden: usize, width: usize, vb: &VarBuilder<'_>) -> Result<Self> {
        Ok(Self::from_layers([
            linear_no_bias(hidden, width, vb.pp("gate_proj"))?,
            linear_no_bias(hidden, width, vb.pp("up_proj"))?,
            linear_no_bias(width, hidden, vb.pp("down_proj"))?,
        ]))
    }

    /// Makes a network of the layers gate, up and down, which may have biases.
    pub fn from_layers([gate, up, down]: [Linear; 3]) -> Self {
        Self { gate, up, down, activation: Activation::Silu }
    }

    /// Returns the layers gate, up and down.
    pub fn layers(&self) -> [&Linear; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// Returns the activation of the gate.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// Applies `activation` to the gate in place of SiLU: [`GeluTanh`](Activation::GeluTanh) makes the
    /// network of Gemma (GEGLU).
    #[must_use]
    pub fn with_activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    /// Returns `residual` + the result for `x`, of one shape.
    ///
    /// # Errors
    ///
    /// The errors of [`swiglu_mlp`](crate::swiglu_mlp()).
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.apply(x, Some(residual))
    }

    fn apply(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let layers = [&self.gate, &self.up, &self.down].map(Linear::affine);
        Ok(swiglu_mlp::apply(x, layers, self.activation, residual)?)
    }
}

impl Module for SwiGlu {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.apply(x, None)
    }
}
