//! A decoder-only transformer over bytes: rotary-free, pre-norm, learned positions.

use candle_core::{D, Device, IndexOp, Result, Tensor};
use candle_nn::{
    Embedding, Linear, Module, RmsNorm, VarBuilder, embedding, linear_no_bias, ops, rms_norm,
};
use serde::{Deserialize, Serialize};

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
        let targets = ids.narrow(1, 1, length)?.contiguous()?.unsqueeze(2)?;
        let log_likelihood =
            ops::log_softmax(&logits, D::Minus1)?.gather(&targets, D::Minus1)?.squeeze(2)?;
        (log_likelihood * weights)?.sum_all()?.neg()
    }

    /// `ids` [batch, length] to logits [batch, length, vocabulary].
    fn logits(&self, ids: &Tensor) -> Result<Tensor> {
        let length = ids.dim(1)?;
        let positions = self.positions.embeddings().narrow(0, 0, length)?;
        let mut x = self.tokens.forward(ids)?.broadcast_add(&positions)?;
        let mask = causal_mask(length, ids.device())?;
        for block in &self.blocks {
            x = block.forward(&x, &mask)?;
        }
        self.head.forward(&self.norm.forward_diff(&x)?)
    }
}

const NORM_EPSILON: f64 = 1e-5;

/// Attention and a feed-forward network, each added to its input.
#[derive(Debug)]
struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(config: Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let hidden = config.hidden;
        Ok(Self {
            attention_norm: rms_norm(hidden, NORM_EPSILON, vb.pp("attention_norm"))?,
            attention: Attention::new(config, &vb.pp("attention"))?,
            mlp_norm: rms_norm(hidden, NORM_EPSILON, vb.pp("mlp_norm"))?,
            up: linear_no_bias(hidden, 4 * hidden, vb.pp("mlp.up"))?,
            down: linear_no_bias(4 * hidden, hidden, vb.pp("mlp.down"))?,
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention.forward(&self.attention_norm.forward_diff(x)?, mask)?)?;
        // ReLU, because it costs a fraction of candle's GELU on a processor and learns as well at
        // this size.
        let mlp = self.down.forward(&self.up.forward(&self.mlp_norm.forward_diff(&x)?)?.relu()?)?;
        x + mlp
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

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (batch, length, hidden) = x.dims3()?;
        let size = hidden / self.heads;
        // [3, batch, heads, length, size]
        let qkv = self.qkv.forward(x)?.reshape((batch, length, 3, self.heads, size))?;
        let qkv = qkv.permute((2, 0, 3, 1, 4))?.contiguous()?;
        let (query, key, value) = (qkv.i(0)?, qkv.i(1)?, qkv.i(2)?);
        let scores = (query.matmul(&key.t()?)? / (size as f64).sqrt())?.broadcast_add(mask)?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&value)?;
        self.out.forward(&mixed.transpose(1, 2)?.reshape((batch, length, hidden))?)
    }
}

/// 0 where a position may attend and −∞ where it would see the future. [length, length]
///
/// Padding needs no mask of its own: it is on the right, where no real token attends.
fn causal_mask(length: usize, device: &Device) -> Result<Tensor> {
    let at = |row, column| if column > row { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> =
        (0..length).flat_map(|row| (0..length).map(move |column| at(row, column))).collect();
    Tensor::from_vec(mask, (length, length), device)
}
