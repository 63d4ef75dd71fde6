//! Linear layers.

use candle_core::{D, DType, Result, Tensor};
use candle_nn::{Module, VarBuilder};

use crate::{
    affine::AffineLayer,
    config::Activation,
    layers::norm::RmsNorm,
    ops::{
        cross_entropy::{CrossEntropy, CrossEntropyConfig, cross_entropy},
        linear::apply,
        linear_add_rms_norm,
        linear_cross_entropy::linear_cross_entropy,
        linear_rope,
    },
};

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
    affine: AffineLayer,
    activation: Option<Activation>,
}

impl Linear {
    /// The name under which a variable builder offers the frozen weight of a layer with an adapter,
    /// as in PEFT. Layers of this crate then read it in place of `weight`, with the matrices
    /// `lora_A.weight` and `lora_B.weight` and the scalar [`LORA_SCALE`](Self::LORA_SCALE).
    pub const BASE_WEIGHT: &'static str = "base_layer.weight";
    /// The name of the factor of an adapter, of type `f64`; see
    /// [`BASE_WEIGHT`](Self::BASE_WEIGHT).
    pub const LORA_SCALE: &'static str = "lora_scale";

    /// Makes a layer of this weight [outputs, inputs] and bias \[outputs\].
    #[expect(clippy::needless_pass_by_value, reason = "the parameters of candle-nn's layer")]
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { affine: AffineLayer::new(&weight, bias.as_ref()), activation: None }
    }

    /// Applies `activation` to the result.
    #[must_use]
    pub fn with_activation(mut self, activation: Activation) -> Self {
        self.activation = Some(activation);
        self
    }

    /// Freezes the weight, and adds the adapter `scale` · B · A of `a` [rank, inputs] and `b`
    /// [outputs, rank], as in [`lora_linear`](crate::lora_linear()).
    #[must_use]
    pub fn with_adapter(self, a: &Tensor, b: &Tensor, scale: f64) -> Self {
        Self { affine: self.affine.with_adapter(a, b, scale), ..self }
    }

    /// Returns the cross-entropy of the layer's results for `x` and `targets`, without results that are
    /// whole in memory: see [`linear_cross_entropy`](crate::linear_cross_entropy()). A layer with a bias, an adapter or an activation
    /// computes all results.
    ///
    /// # Errors
    ///
    /// The errors of [`linear_cross_entropy`](crate::linear_cross_entropy()).
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use fused_ops::{CrossEntropyConfig, layers::Linear};
    ///
    /// let head = Linear::new(Tensor::zeros((10, 4), DType::F32, &Device::Cpu)?, None);
    /// let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
    /// let targets = Tensor::new(&[3_u32, 7], &Device::Cpu)?;
    /// let loss = head.cross_entropy(&x, &targets, &CrossEntropyConfig::default())?;
    /// assert!((loss.mean()?.to_scalar::<f32>()? - 10_f32.ln()).abs() < 1e-6);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn cross_entropy(
        &self,
        x: &Tensor,
        targets: &Tensor,
        config: &CrossEntropyConfig,
    ) -> crate::Result<CrossEntropy> {
        if self.affine.is_product() && self.activation.is_none() {
            linear_cross_entropy(x, self.weight(), targets, config)
        } else {
            cross_entropy(&apply(x, &self.affine, self.activation)?, targets, config)
        }
    }

    /// Returns the result for `x` [batch, length, inputs] as rotated heads [batch, length, heads, size]:
    /// see [`linear_rope`](crate::linear_rope()).
    ///
    /// The cosines and sines are those of all rows [at least length, pairs], or [batch, length, pairs], if
    /// each row has positions of its own.
    ///
    /// # Errors
    ///
    /// The errors of [`linear_rope`](crate::linear_rope()).
    pub fn forward_rope(
        &self,
        x: &Tensor,
        size: usize,
        (cos, sin): (&Tensor, &Tensor),
    ) -> Result<Tensor> {
        if cos.rank() < 3 {
            return Ok(linear_rope::apply(x, &self.affine, size, [cos, sin])?);
        }
        let (batch, length, inputs) = x.dims3()?;
        // `linear_rope` rotates all rows by the same angles, so join the rows to one long row.
        let angles = |angles: &Tensor| {
            angles.broadcast_as((batch, length, angles.dim(D::Minus1)?))?.flatten_to(1)
        };
        let row = x.reshape((1, batch * length, inputs))?;
        let rotated = linear_rope::apply(&row, &self.affine, size, [&angles(cos)?, &angles(sin)?])?;
        rotated.reshape((batch, length, (), size))
    }

    /// Returns `residual` + the result for `x`, and the norm of this sum: see
    /// [`linear_add_rms_norm`](crate::linear_add_rms_norm()).
    ///
    /// # Errors
    ///
    /// The errors of [`linear_add_rms_norm`](crate::linear_add_rms_norm()).
    pub fn forward_add_norm(
        &self,
        x: &Tensor,
        residual: &Tensor,
        norm: &RmsNorm,
    ) -> Result<(Tensor, Tensor)> {
        let (weight, epsilon) = (norm.weight(), norm.eps());
        Ok(linear_add_rms_norm::apply(x, &self.affine, residual, weight, epsilon)?)
    }

    /// Returns layers with these numbers of outputs, side by side in this one: the queries, keys and values
    /// of one projection. They share its parameters, without copies.
    ///
    /// # Errors
    ///
    /// Returns an error if there are fewer outputs.
    pub fn split(&self, outputs: &[usize]) -> Result<Vec<Self>> {
        let mut start = 0;
        let part = |&outputs: &usize| {
            let affine = self.affine.narrow(start, outputs)?;
            start += outputs;
            Ok(Self { affine, activation: self.activation })
        };
        outputs.iter().map(part).collect()
    }

    /// Returns the weight [outputs, inputs], without the adapter.
    pub fn weight(&self) -> &Tensor {
        self.affine.weight()
    }

    /// Returns the bias \[outputs\], if there is one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.affine.bias()
    }

    /// Returns the activation of the result.
    pub(super) fn activation(&self) -> Option<Activation> {
        self.activation
    }

    /// Returns the function before the activation.
    pub(super) fn affine(&self) -> &AffineLayer {
        &self.affine
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(apply(x, &self.affine, self.activation)?)
    }
}

impl From<candle_nn::Linear> for Linear {
    fn from(linear: candle_nn::Linear) -> Self {
        Self::new(linear.weight().clone(), linear.bias().cloned())
    }
}

/// Loads a layer with a `weight` [`out_dim`, `in_dim`] and a `bias` \[`out_dim`\], or initializes it
/// as candle-nn does. The builder may offer an adapter: see [`Linear::BASE_WEIGHT`].
///
/// # Errors
///
/// Returns an error if a parameter cannot be loaded.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    linear_b(in_dim, out_dim, true, vb)
}

/// Loads a layer without a bias.
///
/// # Errors
///
/// The errors of [`linear`](linear()).
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    linear_b(in_dim, out_dim, false, vb)
}

/// Loads a layer with a bias or without.
pub(super) fn linear_b(
    in_dim: usize,
    out_dim: usize,
    bias: bool,
    vb: VarBuilder<'_>,
) -> Result<Linear> {
    if !vb.contains_tensor(Linear::BASE_WEIGHT) {
        return candle_nn::linear_b(in_dim, out_dim, bias, vb).map(Linear::from);
    }
    let weight = vb.get((out_dim, in_dim), Linear::BASE_WEIGHT)?;
    let bias = if bias { Some(vb.get(out_dim, "bias")?) } else { None };
    let a = vb.get_unchecked("lora_A.weight")?;
    let b = vb.get_unchecked("lora_B.weight")?;
    let scale = vb.get_unchecked_dtype(Linear::LORA_SCALE, DType::F64)?.to_scalar()?;
    Ok(Linear::new(weight, bias).with_adapter(&a, &b, scale))
}
