//! Linear layers.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

use crate::config::Activation;

/// A linear layer that computes [`linear`](crate::linear()); replaces `candle_nn::Linear`.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use fused_ops::{Activation, layers::linear};
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let up = linear(4, 16, vb.pp("mlp.up"))?.with_activation(Activation::Gelu);
/// let y = up.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [2, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    activation: Option<Activation>,
}

impl Linear {
    /// Makes a layer of this weight [outputs, inputs] and bias \[outputs\].
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias, activation: None }
    }

    /// Applies `activation` to the result.
    #[must_use]
    pub fn with_activation(mut self, activation: Activation) -> Self {
        self.activation = Some(activation);
        self
    }

    /// Returns the weight [outputs, inputs].
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the activation of the result.
    pub(super) fn activation(&self) -> Option<Activation> {
        self.activation
    }

    /// Returns the bias \[outputs\], if there is one.
    pub(super) fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(crate::linear(x, &self.weight, self.bias.as_ref(), self.activation)?)
    }
}

impl From<candle_nn::Linear> for Linear {
    fn from(linear: candle_nn::Linear) -> Self {
        Self::new(linear.weight().clone(), linear.bias().cloned())
    }
}

/// Loads a layer with a `weight` [`out_dim`, `in_dim`] and a `bias` \[`out_dim`\], or initializes it
/// as candle-nn does.
///
/// # Errors
///
/// Returns an error if a parameter cannot be loaded.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    candle_nn::linear(in_dim, out_dim, vb).map(Linear::from)
}

/// Loads a layer without a bias.
///
/// # Errors
///
/// The errors of [`linear`](linear()).
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    candle_nn::linear_no_bias(in_dim, out_dim, vb).map(Linear::from)
}

/// Loads a layer with a bias or without.
pub(super) fn linear_b(
    in_dim: usize,
    out_dim: usize,
    bias: bool,
    vb: VarBuilder<'_>,
) -> Result<Linear> {
    candle_nn::linear_b(in_dim, out_dim, bias, vb).map(Linear::from)
}
