//! A decoder-only transformer over bytes: rotary-free, pre-norm, learned positions. It is made a
//! unit at a time, where its loss enters it.

use candle_core::{DType, Result, Tensor};
use candle_distributed::{
    ops::{
        self, Activation, AttentionConfig, CrossEntropyConfig,
        layers::{Embedding, Linear, Mlp, RmsNorm, embedding, linear_no_bias, rms_norm},
    },
    plan::ParameterInfo,
    train::{Lora, Loss, UnitRules, Units},
};
use candle_nn::{Module, VarBuilder};
use serde::{Deserialize, Serialize};

use crate::{
    error::{self, Error},
    train::dataset::Tensors,
};

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

/// The model that is trained unless the user asks for other sizes.
pub(crate) const MODEL: Config =
    Config { vocabulary: 256, context: 128, layers: 2, heads: 4, hidden: 128 };

impl Config {
    /// The most layers, and the largest of all other sizes: beyond any model of bytes, and far from
    /// overflow in whatever is computed from them.
    const MOST_LAYERS: usize = 1 << 12;
    const LARGEST: usize = 1 << 16;

    /// The longest sequence to learn from, in bytes: its last byte is predicted and is no input.
    pub(crate) fn longest_sequence(&self) -> usize {
        self.context + 1
    }

    /// Refuses sizes of no transformer.
    pub(crate) fn check(&self) -> error::Result<()> {
        let &Self { vocabulary, context, layers, heads, hidden } = self;
        for (what, size, most) in [
            ("the vocabulary", vocabulary, Self::LARGEST),
            ("--context", context, Self::LARGEST),
            ("--n-layers", layers, Self::MOST_LAYERS),
            ("--n-heads", heads, Self::LARGEST),
            ("--hidden", hidden, Self::LARGEST),
        ] {
            if !(1..=most).contains(&size) {
                return Err(Error::usage(format!("{what} is {size}, must be 1 to {most}")));
            }
        }
        if hidden % heads > 0 {
            let uneven = format!("--hidden {hidden} does not split evenly over --n-heads {heads}");
            return Err(Error::usage(uneven));
        }
        // Every byte is a token.
        if vocabulary < 256 {
            return Err(Error::usage(format!(
                "the vocabulary is {vocabulary}, must be at least 256"
            )));
        }
        Ok(())
    }
}

/// A transformer of these sizes.
#[derive(Clone, Debug)]
pub(crate) struct Transformer {
    pub(crate) config: Config,
    /// Adapters of its blocks, if these alone are trained.
    pub(crate) lora: Option<Lora>,
}

/// The linear layers of a block, which may have adapters.
pub(crate) const LINEAR_LAYERS: [&str; 4] = ["qkv", "out", "up", "down"];

impl Transformer {
    /// One without adapters.
    pub(crate) const fn plain(config: Config) -> Self {
        Self { config, lora: None }
    }

    /// Asks for all parameters.
    pub(crate) fn build(&self, vb: &VarBuilder<'_>) -> Result<()> {
        let build = |vb: VarBuilder<'_>| self.build_own(&vb);
        match &self.lora {
            Some(lora) => lora.adapt(build)(vb.clone()),
            None => build(vb.clone()),
        }
    }

    fn build_own(&self, vb: &VarBuilder<'_>) -> Result<()> {
        let config = self.config;
        Embed::new(config, vb)?;
        for layer in 0..config.layers {
            Block::new(config, &vb.pp(block_name(layer)))?;
        }
        Head::new(config, vb)?;
        Ok(())
    }

    /// Runs a block, with its adapters if it has some.
    fn block(&self, model: &Units, layer: usize, x: &Tensor) -> Result<Tensor> {
        let config = self.config;
        let block = move |vb: VarBuilder<'_>, x: &Tensor| Block::new(config, &vb)?.forward(x);
        match &self.lora {
            Some(lora) => model.unit(&block_name(layer), x, lora.unit(block)),
            None => model.unit(&block_name(layer), x, block),
        }
    }
}

/// Which parameters form which unit: blocks do by their numbers.
pub(crate) fn units() -> UnitRules {
    UnitRules::new().unit(EMBED, ["tokens", "positions"]).unit(HEAD, ["norm", "head"])
}

/// The unit of a parameter.
pub(crate) fn unit_of(name: &str) -> String {
    let mut parts = name.split('.');
    match (parts.next(), parts.next()) {
        (Some("blocks"), Some(layer)) => format!("blocks.{layer}"),
        (Some("tokens" | "positions"), _) => EMBED.to_owned(),
        _ => HEAD.to_owned(),
    }
}

/// A parameter in its unit.
pub(crate) fn with_unit(info: ParameterInfo) -> ParameterInfo {
    let unit = unit_of(info.name());
    info.with_unit(unit)
}

const EMBED: &str = "embed";
const HEAD: &str = "head";

fn block_name(layer: usize) -> String {
    format!("blocks.{layer}")
}

/// The loss of a shard, whose targets are weights: a sum over its predictions, of which a shard may
/// have more per row than others.
pub(crate) fn loss(transformer: &Transformer, model: &Units, batch: Tensors) -> Result<Loss> {
    let Tensors { ids, targets: weights, .. } = batch;
    let predictions = weights.sum_all()?;
    Ok(Loss::sum(summed_loss(transformer, model, &ids, weights)?, predictions))
}

/// The cross-entropy of the tokens after the first, each multiplied by its weight, summed.
///
/// # Shapes
///
/// `ids` [batch, length + 1] u32, `weights` [batch, length] f32; the result is a scalar.
pub(crate) fn summed_loss(
    transformer: &Transformer,
    model: &Units,
    ids: &Tensor,
    weights: Tensor,
) -> Result<Tensor> {
    let config = transformer.config;
    let length = ids.dim(1)? - 1;
    let targets = ids.narrow(1, 1, length)?;
    let inputs = ids.narrow(1, 0, length)?.contiguous()?;
    let x = before_head(transformer, model, &inputs)?;
    model.unit(HEAD, &x, move |vb, x| {
        let logits = Head::new(config, &vb)?.forward(x)?;
        // A mean over many tokens needs more digits than halves have.
        let logits = logits.to_dtype(DType::F32)?;
        let config = CrossEntropyConfig::default().with_row_weights(weights.clone());
        Ok(ops::cross_entropy(&logits, &targets, &config)?.sum)
    })
}

/// The logits of the token after each.
///
/// # Shapes
///
/// `ids` [batch, length] u32; the result is [batch, length, vocabulary].
pub(crate) fn logits(transformer: &Transformer, model: &Units, ids: &Tensor) -> Result<Tensor> {
    let config = transformer.config;
    let x = before_head(transformer, model, ids)?;
    model.unit(HEAD, &x, move |vb, x| Head::new(config, &vb)?.forward(x))
}

/// What the head reads of tokens: `ids` [batch, length] to [batch, length, hidden].
fn before_head(transformer: &Transformer, model: &Units, ids: &Tensor) -> Result<Tensor> {
    let config = transformer.config;
    let embed = move |vb: VarBuilder<'_>, ids: &Tensor| Embed::new(config, &vb)?.forward(ids);
    let mut x = model.unit(EMBED, ids, embed)?;
    for layer in 0..config.layers {
        x = transformer.block(model, layer, &x)?;
    }
    Ok(x)
}

/// Tokens and their places.
struct Embed {
    tokens: Embedding,
    positions: Embedding,
}

impl Embed {
    fn new(config: Config, vb: &VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            tokens: embedding(config.vocabulary, config.hidden, vb.pp("tokens"))?,
            positions: embedding(config.context, config.hidden, vb.pp("positions"))?,
        })
    }

    /// `ids` [batch, length] to [batch, length, hidden].
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let positions = self.positions.embeddings().narrow(0, 0, ids.dim(1)?)?;
        self.tokens.forward(ids)?.broadcast_add(&positions)
    }
}

/// The last norm, and a logit for every token.
struct Head {
    norm: RmsNorm,
    out: Linear,
}

impl Head {
    fn new(config: Config, vb: &VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            norm: rms_norm(config.hidden, NORM_EPSILON, vb.pp("norm"))?,
            out: linear_no_bias(config.hidden, config.vocabulary, vb.pp("head"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.out.forward(&self.norm.forward(x)?)
    }
}

const NORM_EPSILON: f64 = 1e-5;

/// Attention and a feed-forward network, each added to its input.
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

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let attended = self.attention.forward(&self.attention_norm.forward(x)?)?;
        let (x, normed) = self.mlp_norm.forward_add(x, &attended)?;
        x + self.mlp.forward(&normed)?
    }
}

/// Causal multi-head attention.
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
