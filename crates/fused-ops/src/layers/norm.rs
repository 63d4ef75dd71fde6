//! Normalization with learned weights.

use candle_core::{Result, Tensor};
use candle_nn::{LayerNormConfig, Module, VarBuilder};

/// A norm that computes [`rms_norm`](crate::rms_norm()); replaces `candle_nn::RmsNorm`.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use fused_ops::layers::rms_norm;
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let norm = rms_norm(4, 1e-6, vb.pp("norm"))?;
/// let y = norm.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?;
/// assert!(y.sum_all()?.backward()?.get(norm.weight()).is_some());
/// assert!(vars.data().lock().unwrap().contains_key("norm.weight"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    epsilon: f64,
}

impl RmsNorm {
    /// Makes a norm of this weight \[hidden\]; `eps` is added to the mean square. The weight may be `f32`
    /// beside inputs of half precision, such as Gemma's 1 + w.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self { weight, epsilon: eps }
    }

    /// Returns the weight \[hidden\].
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the number that is added to the mean square.
    pub(super) fn eps(&self) -> f64 {
        self.epsilon
    }

    /// Returns `x` + `residual` and its norm: see [`add_rms_norm`](crate::add_rms_norm).
    ///
    /// # Errors
    ///
    /// The errors of [`add_rms_norm`](crate::add_rms_norm).
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok(crate::add_rms_norm(x, residual, &self.weight, self.epsilon)?)
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(crate::rms_norm(x, &self.weight, self.epsilon)?)
    }
}

impl From<candle_nn::RmsNorm> for RmsNorm {
    fn from(norm: candle_nn::RmsNorm) -> Self {
        Self::new(norm.weight().clone(), norm.eps())
    }
}

/// Loads a norm with a `weight` \[size\], or initializes the weight to ones.
///
/// # Errors
///
/// Returns an error if the weight cannot be loaded.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<RmsNorm> {
    candle_nn::rms_norm(size, eps, vb).map(RmsNorm::from)
}

/// A norm that computes [`layer_norm`](crate::layer_norm()); replaces `candle_nn::LayerNorm`.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use fused_ops::layers::layer_norm;
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let norm = layer_norm(2, 1e-12, vb.pp("LayerNorm"))?;
/// let y = norm.forward(&Tensor::new(&[[1.0_f32, 3.0]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[-1.0, 1.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    remove_mean: bool,
    epsilon: f64,
}

impl LayerNorm {
    /// Makes a norm of this weight and bias, both \[hidden\]; `eps` is added to the variance.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self { weight, bias: Some(bias), remove_mean: true, epsilon: eps }
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if self.remove_mean {
            return Ok(crate::layer_norm(x, &self.weight, self.bias.as_ref(), self.epsilon)?);
        }
        let y = crate::rms_norm(x, &self.weight, self.epsilon)?;
        match &self.bias {
            None => Ok(y),
            Some(bias) => y.broadcast_add(bias),
        }
    }
}

impl From<candle_nn::LayerNorm> for LayerNorm {
    fn from(norm: candle_nn::LayerNorm) -> Self {
        Self {
            weight: norm.weight().clone(),
            bias: norm.bias().cloned(),
            remove_mean: norm.remove_mean(),
            epsilon: norm.eps(),
        }
    }
}

/// Loads a norm with a `weight` \[size\] and, if `config` has one, a `bias` \[size\], or initializes
/// them to ones and zeros.
///
/// # Errors
///
/// Returns an error if a parameter cannot be loaded.
pub fn layer_norm(
    size: usize,
    config: impl Into<LayerNormConfig>,
    vb: VarBuilder<'_>,
) -> Result<LayerNorm> {
    candle_nn::layer_norm(size, config, vb).map(LayerNorm::from)
}
