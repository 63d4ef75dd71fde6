//! BERT (Devlin et al., arXiv 1810.04805) with a classifier on its first token.
//!
//! This is ordinary candle code with layers from `candle_distributed::ops`, which have a backward.
//! Parameter names are from Hugging Face's `BertForSequenceClassification`, and the fields of
//! [`BertConfig`] from its `config.json`.

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
pub(crate) struct BertConfig {
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

impl BertConfig {
    /// Returns the sizes of a small model for `vocabulary` words and texts up to `length`.
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

/// Dropout with a new key in each call; without keys, as in evaluation, it returns its input.
#[derive(Debug)]
struct KeyedDropout {
    probability: f64,
    keys: Option<BatchKeys>,
}

impl KeyedDropout {
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
    embeddings: InputEmbeddings,
    layers: Vec<EncoderLayer>,
    pooler: Linear,
    classifier: Linear,
    dropout: f64,
}

impl BertClassifier {
    pub(crate) fn new(config: &BertConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let hidden = config.hidden_size;
        let bert = vb.pp("bert");
        let mut layers = Vec::new();
        for n in 0..config.num_hidden_layers {
            layers.push(EncoderLayer::new(config, &bert.pp("encoder.layer").pp(n))?);
        }
        Ok(Self {
            embeddings: InputEmbeddings::new(config, &bert.pp("embeddings"))?,
            layers,
            pooler: linear(hidden, hidden, bert.pp("pooler.dense"))?,
            classifier: linear(hidden, config.num_labels, vb.pp("classifier"))?,
            dropout: config.hidden_dropout_prob,
        })
    }

    /// Computes logits [batch, labels] from token `ids` [batch, length]. `mask` has the same shape,
    /// with 1 for tokens and 0 for padding at the end of a row. `keys` are for dropout.
    pub(crate) fn forward(
        &self,
        ids: &Tensor,
        mask: &Tensor,
        keys: Option<BatchKeys>,
    ) -> Result<Tensor> {
        let dropout = &mut KeyedDropout { probability: self.dropout, keys };
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
struct InputEmbeddings {
    words: Embedding,
    positions: Embedding,
    token_types: Embedding,
    norm: LayerNorm,
}

impl InputEmbeddings {
    fn new(config: &BertConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let table = |rows, name| embedding(rows, config.hidden_size, vb.pp(name));
        Ok(Self {
            words: table(config.vocab_size, "word_embeddings")?,
            positions: table(config.max_position_embeddings, "position_embeddings")?,
            token_types: table(config.type_vocab_size, "token_type_embeddings")?,
            norm: norm(config, vb)?,
        })
    }

    fn forward(&self, ids: &Tensor, dropout: &mut KeyedDropout) -> Result<Tensor> {
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
struct EncoderLayer {
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

impl EncoderLayer {
    fn new(config: &BertConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let hidden = config.hidden_size;
        let width = config.intermediate_size;
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
        dropout: &mut KeyedDropout,
    ) -> Result<Tensor> {
        let [query, key, value] = [&self.query, &self.key, &self.value];
        let mixed = ops::attention(
            &self.project_heads(query, x)?,
            &self.project_heads(key, x)?,
            &self.project_heads(value, x)?,
            unpadded,
        )?;
        let attended = self.attended.forward(&mixed.flatten_from(2)?)?;
        let x = self.attended_norm.forward(&(dropout.apply(&attended)? + x)?)?;
        let down = self.down.forward(&self.up.forward(&x)?)?;
        self.norm.forward(&(dropout.apply(&down)? + x)?)
    }

    /// Projects `x` [batch, length, hidden] and splits it into heads.
    fn project_heads(&self, projection: &Linear, x: &Tensor) -> Result<Tensor> {
        let (batch, length, hidden) = x.dims3()?;
        projection.forward(x)?.reshape((batch, length, self.heads, hidden / self.heads))
    }
}

fn norm(config: &BertConfig, vb: &VarBuilder<'_>) -> Result<LayerNorm> {
    layer_norm(config.hidden_size, config.layer_norm_eps, vb.pp("LayerNorm"))
}
