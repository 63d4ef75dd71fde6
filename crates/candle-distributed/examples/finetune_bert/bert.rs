//! BERT (Devlin et al., arXiv 1810.04805) with a classifier on its first token.
//!
//! Ordinary candle code, but for the layers: those of `candle_distributed::ops` have a backward.
//! Parameters have the names of Hugging Face's `BertForSequenceClassification`, and [`Config`] the
//! fields of its `config.json`.

use candle_core::{DType, Result, Tensor};
use candle_distributed::{
    mesh::BatchKeys,
    ops::{
        self, Activation, AttentionConfig, DropoutKey,
        layers::{Embedding, LayerNorm, Linear, embedding, layer_norm, linear},
    },
};
use candle_nn::{Module, VarBuilder};

/// The sizes of a model.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) max_position_embeddings: usize,
    pub(crate) type_vocab_size: usize,
    pub(crate) layer_norm_eps: f64,
    pub(crate) hidden_dropout_prob: f64,
    pub(crate) num_labels: usize,
}

impl Config {
    /// A small model of this many words, for texts of at most this length.
    pub(crate) fn small(vocabulary: usize, length: usize) -> Self {
        Self {
            vocab_size: vocabulary,
            hidden_size: 32,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            intermediate_size: 128,
            max_position_embeddings: length,
            type_vocab_size: 2,
            layer_norm_eps: 1e-12,
            hidden_dropout_prob: 0.1,
            num_labels: 2,
        }
    }
}

/// Sets elements to zero, each time with another key; without, as in evaluation, it does nothing.
#[derive(Debug)]
struct Dropout {
    probability: f64,
    keys: Option<BatchKeys>,
}

impl Dropout {
    fn apply(&mut self, x: &Tensor) -> Result<Tensor> {
        let Some(keys) = &mut self.keys else { return Ok(x.clone()) };
        let key = keys.next_key(x)?;
        let key = DropoutKey { seed: key.seed.as_u64(), call: 0, offset: key.offset };
        Ok(ops::dropout(x, self.probability, key)?)
    }
}

/// An encoder, a pooler and a classifier.
#[derive(Debug)]
pub(crate) struct BertClassifier {
    embeddings: Embeddings,
    layers: Vec<Layer>,
    pooler: Linear,
    classifier: Linear,
    dropout: f64,
}

impl BertClassifier {
    pub(crate) fn new(config: &Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let (hidden, bert) = (config.hidden_size, vb.pp("bert"));
        let layer = |n| Layer::new(config, &bert.pp("encoder.layer").pp(n));
        Ok(Self {
            embeddings: Embeddings::new(config, &bert.pp("embeddings"))?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            pooler: linear(hidden, hidden, bert.pp("pooler.dense"))?,
            classifier: linear(hidden, config.num_labels, vb.pp("classifier"))?,
            dropout: config.hidden_dropout_prob,
        })
    }

    /// The logits [batch, labels] of token `ids` [batch, length]; `mask`, of the same shape, is 0
    /// at the end of a row, where there is padding, and 1 before it. `keys` are for dropout.
    pub(crate) fn forward(
        &self,
        ids: &Tensor,
        mask: &Tensor,
        keys: Option<BatchKeys>,
    ) -> Result<Tensor> {
        let dropout = &mut Dropout { probability: self.dropout, keys };
        let lengths: Vec<u32> = mask.to_dtype(DType::U32)?.sum(1)?.to_vec1()?;
        let lengths = lengths.into_iter().map(|length| length as usize).collect();
        let unpadded = AttentionConfig::default().with_key_lengths(lengths);
        let mut x = self.embeddings.forward(ids, dropout)?;
        for layer in &self.layers {
            x = layer.forward(&x, &unpadded, dropout)?;
        }
        let first = x.narrow(1, 0, 1)?.squeeze(1)?;
        let pooled = self.pooler.forward(&first)?.tanh()?;
        self.classifier.forward(&dropout.apply(&pooled)?)
    }
}

#[derive(Debug)]
struct Embeddings {
    words: Embedding,
    positions: Embedding,
    token_types: Embedding,
    norm: LayerNorm,
}

impl Embeddings {
    fn new(config: &Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let table = |rows, name| embedding(rows, config.hidden_size, vb.pp(name));
        Ok(Self {
            words: table(config.vocab_size, "word_embeddings")?,
            positions: table(config.max_position_embeddings, "position_embeddings")?,
            token_types: table(config.type_vocab_size, "token_type_embeddings")?,
            norm: norm(config, vb)?,
        })
    }

    fn forward(&self, ids: &Tensor, dropout: &mut Dropout) -> Result<Tensor> {
        let length = ids.dim(1)?;
        let positions = self.positions.embeddings().narrow(0, 0, length)?;
        let first_type = self.token_types.embeddings().narrow(0, 0, 1)?;
        let words = self.words.forward(ids)?;
        let x = words.broadcast_add(&positions.broadcast_add(&first_type)?)?;
        dropout.apply(&self.norm.forward(&x)?)
    }
}

/// A transformer layer, normalized after each of its two parts.
#[derive(Debug)]
struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    attended: Linear,
    attended_norm: LayerNorm,
    up: Linear,
    down: Linear,
    norm: LayerNorm,
    heads: usize,
}

impl Layer {
    fn new(config: &Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let attention = vb.pp("attention");
        Ok(Self {
            query: linear(hidden, hidden, attention.pp("self.query"))?,
            key: linear(hidden, hidden, attention.pp("self.key"))?,
            value: linear(hidden, hidden, attention.pp("self.value"))?,
            attended: linear(hidden, hidden, attention.pp("output.dense"))?,
            attended_norm: norm(config, &attention.pp("output"))?,
            up: linear(hidden, width, vb.pp("intermediate.dense"))?
                .with_activation(Activation::Gelu),
            down: linear(width, hidden, vb.pp("output.dense"))?,
            norm: norm(config, &vb.pp("output"))?,
            heads: config.num_attention_heads,
        })
    }

    fn forward(
        &self,
        x: &Tensor,
        unpadded: &AttentionConfig,
        dropout: &mut Dropout,
    ) -> Result<Tensor> {
        let [query, key, value] = [&self.query, &self.key, &self.value];
        let mixed = ops::attention(
            &self.heads_of(query, x)?,
            &self.heads_of(key, x)?,
            &self.heads_of(value, x)?,
            unpadded,
        )?;
        let attended = self.attended.forward(&mixed.flatten_from(2)?)?;
        let x = self.attended_norm.forward(&(dropout.apply(&attended)? + x)?)?;
        let down = self.down.forward(&self.up.forward(&x)?)?;
        self.norm.forward(&(dropout.apply(&down)? + x)?)
    }

    /// A projection of `x` [batch, length, hidden], cut into heads.
    fn heads_of(&self, projection: &Linear, x: &Tensor) -> Result<Tensor> {
        let (batch, length, hidden) = x.dims3()?;
        projection.forward(x)?.reshape((batch, length, self.heads, hidden / self.heads))
    }
}

fn norm(config: &Config, vb: &VarBuilder<'_>) -> Result<LayerNorm> {
    layer_norm(config.hidden_size, config.layer_norm_eps, vb.pp("LayerNorm"))
}
