//! Linear layers and norms of a decoder, from its variables.

use candle_core::{DType, Error, Result, Tensor};
use candle_nn::VarBuilder;
use fused_ops::layers::{self, Linear, RmsNorm, linear_no_bias};

use crate::models::{config::DecoderConfig, names::LinearSizes};

/// Builds a layer from the variables below its name.
pub(super) fn linear(sizes: LinearSizes, vb: &VarBuilder<'_>) -> Result<Linear> {
    let LinearSizes { name, inputs, outputs, bias } = sizes;
    let build = if bias { layers::linear } else { linear_no_bias };
    build(inputs, outputs, vb.pp(name))
}

/// Builds layers with these numbers of outputs: each from its own variables, or all from one weight with
/// the rows of all.
pub(super) fn linears<const N: usize>(
    sizes: Vec<LinearSizes>,
    outputs: [usize; N],
    vb: &VarBuilder<'_>,
) -> Result<[Linear; N]> {
    let layers = sizes.into_iter().map(|sizes| linear(sizes, vb)).collect::<Result<Vec<_>>>()?;
    let layers = if let [all] = &layers[..] { all.split(&outputs)? } else { layers };
    layers
        .try_into()
        .map_err(|layers: Vec<_>| Error::Msg(format!("{} layers, not {N}", layers.len())))
}

/// Builds a norm over `size` elements.
pub(super) fn norm(config: &DecoderConfig, size: usize, vb: &VarBuilder<'_>) -> Result<RmsNorm> {
    let weight = vb.get(size, "weight")?;
    if config.norm_offset == 0. {
        return Ok(RmsNorm::new(weight, config.rms_norm_eps));
    }
    // In half precision, weights near 0 have more digits than their sum with 1.
    let weight = (weight.to_dtype(DType::F32)? + config.norm_offset)?;
    Ok(RmsNorm::new(weight, config.rms_norm_eps))
}

impl DecoderConfig {
    /// Multiplies embeddings by their factor.
    #[expect(clippy::float_cmp, reason = "only a factor of exactly 1 changes nothing")]
    pub(super) fn scale_embeddings(&self, x: Tensor) -> Result<Tensor> {
        if self.embedding_scale == 1. { Ok(x) } else { x * self.embedding_scale }
    }

    /// Scales and caps the results of the head.
    #[expect(clippy::float_cmp, reason = "only a factor of exactly 1 changes nothing")]
    pub(super) fn finish_logits(&self, logits: Tensor) -> Result<Tensor> {
        let logits = if self.logit_scale == 1. { logits } else { (logits * self.logit_scale)? };
        match self.logit_softcap {
            None => Ok(logits),
            Some(cap) => (logits / cap)?.tanh()? * cap,
        }
    }
}
