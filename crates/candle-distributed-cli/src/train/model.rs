//! A decoder-only transformer over bytes: rotary-free, pre-norm, learned positions.

use candle_core::{Result, Tensor};
use candle_distributed::ops::{
    self, Activation, AttentionConfig, CrossEntropyConfig,
    layers::{Embedding, Linear, Mlp, RmsNorm, embedding, linear_no_bias, rms_norm},
};
use candle_nn::{Module, VarBuilder};
use serde::{Deserialize, Serialize};

use crate::train::corpus::MAX_SEQUENCE_LENGTH;

/// The sizes of a transformer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Config {
    /// Number of different tokens.
    pub(crate) vocabulary: usize,
    /// The longest input, in tokens.
    pub(crate) context: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    /// Width of the residual stream.
    pub(crate) hidden: usize,
}

/// The model that is trained.
pub(crate) const MODEL: Config =
    Config { vocabulary: 256, context: MAX_SEQUENCE_LENGTH - 1, layers: 2, heads: 4, hidden: 128 };

/// Predicts the next token at every position.
#[derive(Debug)]
pub(crate) struct Transformer {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
}

impl Transformer {
    pub(crate) fn new(config: Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let block = |layer| Block::new(config, &vb.pp(format!("blocks.{layer}")));
        Ok(Self {
            tokens: embedding(config.vocabulary, config.hidden, vb.pp("tokens"))?,
            positions: embedding(config.context, config.hidden, vb.pp("positions"))?,
            blocks: (0..config.layers).map(block).collect::<Result<_>>()?,
            norm: rms_norm(config.hidden, NORM_EPSILON, vb.pp("norm"))?,
            head: linear_no_bias(config.hidden, config.vocabulary, vb.pp("head"))?,
        })
    }

    /// The cross-entropy of the tokens after the first, each multiplied by its weight, summed.
    ///
    /// # Shapes
    ///
    /// `ids` [batch, length + 1] u32, `weights` [batch, length] f32; the result is a scalar.
    pub(crate) fn loss(&self, ids: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let length = ids.dim(1)? - 1;
        let logits = self.logits(&ids.narrow(1, 0, length)?.contiguous()?)?;
        let config = CrossEntropyConfig::default().with_row_weights(weights.clone());
        Ok(ops::cross_entropy(&logits, &ids.narrow(1, 1, length)?, &config)?.sum)
    }

    /// `ids` [batch, length] to logits [batch, length, vocabulary].
    fn logits(&self, ids: &Tensor) -> Result<Tensor> {
        let length = ids.dim(1)?;
        let positions = self.positions.embeddings().narrow(0, 0, length)?;
        let mut x = self.tokens.forward(ids)?.broadcast_add(&positions)?;
        let mut normed = self.norm_before(0).forward(&x)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            let (attended, added) = block.forward(&x, &normed)?;
            (x, normed) = self.norm_before(layer + 1).forward_add(&attended, &added)?;
        }
        self.head.forward(&normed)
    }

    /// The norm that a block begins with; the last one stands before the head.
    fn norm_before(&self, layer: usize) -> &RmsNorm {
        self.blocks.get(layer).map_or(&self.norm, |block| &block.attention_norm)
    }
}

const NORM_EPSILON: f64 = 1e-5;

/// Attention and a feed-forward network, each added to its input.
#[derive(Debug)]
struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

impl Block {
    fn new(config: Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let hidden = config.hidden;
        Ok(Self {
            attention_norm: rms_norm(hidden, NORM_EPSILON, vb.pp("attention_norm"))?,
            attention: Attention::new(config, &vb.pp("attention"))?,
            mlp_norm: rms_norm(hidden, NORM_EPSILON, vb.pp("mlp_norm"))?,
            // ReLU costs less than GELU, and learns as well at this size.
            mlp: Mlp::new(
                linear_no_bias(hidden, 4 * hidden, vb.pp("mlp.up"))?
                    .with_activation(Activation::Relu),
                linear_no_bias(4 * hidden, hidden, vb.pp("mlp.down"))?,
            ),
        })
    }

    /// What the block adds to `x` in the end is added by the norm that follows it.
    fn forward(&self, x: &Tensor, normed: &Tensor) -> Result<(Tensor, Tensor)> {
        let (x, normed) = self.mlp_norm.forward_add(x, &self.attention.forward(normed)?)?;
        let added = self.mlp.forward(&normed)?;
        Ok((x, added))
    }
}

/// Causal multi-head attention.
#[derive(Debug)]
struct Attention {
    heads: usize,
    qkv: Linear,
    out: Linear,
}

impl Attention {
    fn new(config: Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let hidden = config.hidden;
        Ok(Self {
            heads: config.heads,
            qkv: linear_no_bias(hidden, 3 * hidden, vb.pp("qkv"))?,
            out: linear_no_bias(hidden, hidden, vb.pp("out"))?,
        })
    }

    /// Padding needs no mask: it stands on the right, where no real token looks.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (heads, config) = (self.heads, AttentionConfig::causal());
        let mixed = ops::attention_packed(&self.qkv.forward(x)?, heads, heads, &config)?;
        self.out.forward(&mixed)
    }
}
