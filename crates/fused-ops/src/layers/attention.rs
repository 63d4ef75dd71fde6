//! Attention between its projections.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::{
    linear::{Linear, linear_b},
    norm::RmsNorm,
};
use crate::config::AttentionConfig;

/// The sizes of an [`Attention`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttentionSizes {
    /// The width of the residual stream.
    pub hidden: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of heads of keys and values; it must divide `heads`. Default: `heads`.
    pub key_heads: usize,
    /// The number of elements of a head. Default: `hidden` / `heads`.
    pub head_size: usize,
    /// Whether queries, keys and values have a bias, as in Qwen 2. Default: `false`.
    pub bias: bool,
}

impl AttentionSizes {
    /// Divides `hidden` evenly over `heads` query heads, each with its own key and value head.
    ///
    /// # Examples
    ///
    /// ```
    /// let sizes = fused_ops::layers::AttentionSizes::new(4096, 32).with_key_heads(8);
    /// assert_eq!(sizes.head_size, 128);
    /// ```
    pub fn new(hidden: usize, heads: usize) -> Self {
        let head_size = hidden / heads.max(1);
        Self { hidden, heads, key_heads: heads, head_size, bias: false }
    }

    /// Sets the number of key and value heads, each shared by several query heads.
    #[must_use]
    pub fn with_key_heads(mut self, heads: usize) -> Self {
        self.key_heads = heads;
        self
    }
}

/// [`attention`](crate::attention()) between its four projections, with the parameter names of
/// Llama and its relatives: `q_proj`, `k_proj`, `v_proj` and `o_proj`.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fused_ops::{AttentionConfig, layers::{Attention, AttentionSizes}};
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let layer = Attention::new(AttentionSizes::new(8, 4).with_key_heads(2), &vb.pp("self_attn"))?;
/// let x = Tensor::ones((1, 3, 8), DType::F32, &Device::Cpu)?;
/// let y = layer.forward(&x, None, &AttentionConfig::causal())?;
/// assert_eq!(y.dims(), [1, 3, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Attention {
    sizes: AttentionSizes,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

impl Attention {
    /// Loads the projections, or initializes them as candle-nn does.
    ///
    /// # Errors
    ///
    /// Returns an error if a projection cannot be loaded.
    pub fn new(sizes: AttentionSizes, vb: &VarBuilder<'_>) -> Result<Self> {
        let AttentionSizes { hidden, heads, key_heads, head_size, bias } = sizes;
        Ok(Self {
            sizes,
            query: linear_b(hidden, heads * head_size, bias, vb.pp("q_proj"))?,
            key: linear_b(hidden, key_heads * head_size, bias, vb.pp("k_proj"))?,
            value: linear_b(hidden, key_heads * head_size, bias, vb.pp("v_proj"))?,
            output: linear_b(heads * head_size, hidden, false, vb.pp("o_proj"))?,
        })
    }

    /// Attends from each position of `x` [batch, length, hidden].
    ///
    /// `rotation` contains the cosines and sines [at least length, pairs] that rotate queries and keys,
    /// as in [`rope_thd`](crate::rope_thd), with at most head size / 2 pairs; or [batch, length, pairs],
    /// if each row has separate positions.
    ///
    /// # Errors
    ///
    /// The errors of [`attention`](crate::attention()) and [`rope_thd`](crate::rope_thd).
    pub fn forward(
        &self,
        x: &Tensor,
        rotation: Option<(&Tensor, &Tensor)>,
        config: &AttentionConfig,
    ) -> Result<Tensor> {
        self.output.forward(&self.attend(x, rotation, config)?)
    }

    /// Returns `residual` + the result of [`forward`](Self::forward), and its norm, which the
    /// feed-forward network takes: see [`linear_add_rms_norm`](crate::linear_add_rms_norm()).
    ///
    /// # Errors
    ///
    /// The errors of [`forward`](Self::forward) and [`linear_add_rms_norm`](crate::linear_add_rms_norm()).
    pub fn forward_add_norm(
        &self,
        x: &Tensor,
        rotation: Option<(&Tensor, &Tensor)>,
        config: &AttentionConfig,
        residual: &Tensor,
        norm: &RmsNorm,
    ) -> Result<(Tensor, Tensor)> {
        let attended = self.attend(x, rotation, config)?;
        self.output.forward_add_norm(&attended, residual, norm)
    }

    /// Returns the concatenated results of the heads, the input of the output projection.
    fn attend(
        &self,
        x: &Tensor,
        rotation: Option<(&Tensor, &Tensor)>,
        config: &AttentionConfig,
    ) -> Result<Tensor> {
        let AttentionSizes { heads, key_heads, head_size, .. } = self.sizes;
        let (query, key) = match rotation {
            None => (
                self.project_heads(x, &self.query, heads)?,
                self.project_heads(x, &self.key, key_heads)?,
            ),
            Some(rotation) => (
                self.query.forward_rope(x, head_size, rotation)?,
                self.key.forward_rope(x, head_size, rotation)?,
            ),
        };
        let value = self.project_heads(x, &self.value, key_heads)?;
        crate::attention(&query, &key, &value, config)?.flatten_from(2)
    }

    /// Projects `x`, and cuts it into heads.
    fn project_heads(&self, x: &Tensor, projection: &Linear, heads: usize) -> Result<Tensor> {
        let (batch, length, _) = x.dims3()?;
        projection.forward(x)?.reshape((batch, length, heads, self.sizes.head_size))
    }
}
