//! The Llama family: Llama 2 and 3, Qwen 2 and 2.5, Mistral.
//!
//! The layers come from fused-ops, and have Hugging Face's names.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Init, Module, VarBuilder, init};
use dist_train::{Lora, Loss, UnitRules, Units};
use fused_ops::{
    AttentionConfig, CrossEntropyConfig,
    layers::{
        Attention, AttentionSizes, Embedding, Linear, RmsNorm, SwiGlu, embedding, linear_no_bias,
        rms_norm,
    },
};

use crate::models::{
    config::LlamaConfig,
    error::ModelError,
    rope::tables,
    tokens::{Packing, Tokens},
};

/// The label of a token that is not a target, as in PyTorch.
const IGNORED: i64 = -100;

pub(super) const EMBEDDING: &str = "model.embed_tokens";
pub(super) const NORM: &str = "model.norm";
pub(super) const HEAD: &str = "lm_head";
pub(super) const INPUT_NORM: &str = "input_layernorm";
pub(super) const ATTENTION: &str = "self_attn";
pub(super) const POST_ATTENTION_NORM: &str = "post_attention_layernorm";
pub(super) const MLP: &str = "mlp";

/// Names of the units other than blocks.
const EMBED_UNIT: &str = "embed";
const HEAD_UNIT: &str = "head";

/// A decoder of the Llama family with its variables in [`Units`]: the embedding is the unit
/// `embed`, each block is a unit (`model.layers.0`), and the last norm and the head form the unit
/// `head`.
///
/// See the [module's](crate::models) example.
#[derive(Clone, Debug)]
pub struct Llama {
    config: LlamaConfig,
    lora: Option<Lora>,
}

impl Llama {
    /// Patterns of the norms, usually without weight decay: `.group("no_decay", Llama::NORMS)` of a
    /// builder. Patterns match whole components of a name, so `norm` matches only the last norm.
    pub const NORMS: [&'static str; 3] = ["norm", INPUT_NORM, POST_ATTENTION_NORM];

    /// Makes a model with the sizes of a configuration.
    ///
    /// # Errors
    ///
    /// [`ModelError::Field`] if a size is out of range, or if a sequence may be longer than the
    /// attention window.
    pub fn from_config(config: LlamaConfig) -> std::result::Result<Self, ModelError> {
        config.check()?;
        Ok(Self { config, lora: None })
    }

    /// Adds adapters to the layers that they name (`q_proj`, `gate_proj`, …):
    /// [`declare`](Self::declare) requests their variables too, and [`logits`](Self::logits) and
    /// [`loss`](Self::loss) apply them.
    ///
    /// # Errors
    ///
    /// [`ModelError::Adapter`] for the embedding, and for a head that is tied to it: a merged adapter
    /// would change both, while training would apply it to the head only.
    pub fn with_lora(self, lora: Lora) -> std::result::Result<Self, ModelError> {
        let is_tied = self.config.tie_word_embeddings;
        for layer in [EMBEDDING, HEAD].into_iter().take(if is_tied { 2 } else { 1 }) {
            if lora.adapts(layer) {
                return Err(ModelError::Adapter { layer, is_tied });
            }
        }
        Ok(Self { lora: Some(lora), ..self })
    }

    /// Returns the adapters, if any.
    #[must_use]
    pub fn lora(&self) -> Option<&Lora> {
        self.lora.as_ref()
    }

    /// Returns the configuration, with the sizes of the model.
    #[must_use]
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Requests all variables by their names in Hugging Face folders. Pass it as the constructor to
    /// [`DataParallel::builder`](dist_train::DataParallel::builder) or
    /// [`FullyShard::builder`](dist_train::FullyShard::builder).
    ///
    /// Random values are as in transformers: matrices are normal with the standard deviation
    /// [`initializer_range`](LlamaConfig::initializer_range), norms 1, biases 0. Folders of the first
    /// Llamas also contain frequencies, which `.allow_unexpected(["rotary_emb"])` of a builder skips.
    ///
    /// # Errors
    ///
    /// The errors of the builder, and of [`Lora::adapt`] with adapters.
    pub fn declare(&self, vb: &VarBuilder<'_>) -> Result<()> {
        match &self.lora {
            Some(lora) => lora.adapt(|vb| self.declare_base(&vb))(vb.clone()),
            None => self.declare_base(vb),
        }
    }

    fn declare_base(&self, vb: &VarBuilder<'_>) -> Result<()> {
        let LlamaConfig { vocab_size, hidden_size, .. } = self.config;
        self.declare_matrix(&vb.pp(EMBEDDING), vocab_size, hidden_size)?;
        for layer in 0..self.config.num_hidden_layers {
            self.declare_block(&vb.pp(block_name(layer)))?;
        }
        vb.pp(NORM).get_with_hints(hidden_size, "weight", init::ONE)?;
        if !self.config.tie_word_embeddings {
            self.declare_matrix(&vb.pp(HEAD), vocab_size, hidden_size)?;
        }
        Ok(())
    }

    fn declare_block(&self, vb: &VarBuilder<'_>) -> Result<()> {
        let &LlamaConfig { hidden_size, intermediate_size, head_dim, .. } = &self.config;
        let queries = self.config.num_attention_heads * head_dim;
        let keys = self.config.num_key_value_heads * head_dim;
        for norm in [INPUT_NORM, POST_ATTENTION_NORM] {
            vb.pp(norm).get_with_hints(hidden_size, "weight", init::ONE)?;
        }
        let attention = vb.pp(ATTENTION);
        for (name, rows) in [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)] {
            self.declare_matrix(&attention.pp(name), rows, hidden_size)?;
            if self.config.attention_bias {
                attention.pp(name).get_with_hints(rows, "bias", init::ZERO)?;
            }
        }
        self.declare_matrix(&attention.pp("o_proj"), hidden_size, queries)?;
        let mlp = vb.pp(MLP);
        self.declare_matrix(&mlp.pp("gate_proj"), intermediate_size, hidden_size)?;
        self.declare_matrix(&mlp.pp("up_proj"), intermediate_size, hidden_size)?;
        self.declare_matrix(&mlp.pp("down_proj"), hidden_size, intermediate_size)
    }

    fn declare_matrix(&self, vb: &VarBuilder<'_>, rows: usize, columns: usize) -> Result<()> {
        let random = Init::Randn { mean: 0., stdev: self.config.initializer_range };
        vb.get_with_hints((rows, columns), "weight", random).map(drop)
    }

    /// Returns the rules that assign variables to units. Each numbered block is a unit by default.
    pub fn units(&self) -> UnitRules {
        UnitRules::new().unit(EMBED_UNIT, [EMBEDDING]).unit(HEAD_UNIT, [NORM, self.head_name()])
    }

    /// Returns patterns of tensors that weight files may contain although the model has no such
    /// variables: frequencies in folders of the first Llamas, and a tied head.
    pub(crate) fn unexpected_weights(&self) -> Vec<&'static str> {
        let head = self.config.tie_word_embeddings.then_some(HEAD);
        ["rotary_emb"].into_iter().chain(head).collect()
    }

    /// Returns next-token logits [rows, length, vocabulary].
    ///
    /// # Errors
    ///
    /// [`ModelError::TooLong`] for more tokens than positions, and the errors of [`Units::unit`].
    pub fn logits(&self, model: &Units, tokens: &Tokens) -> Result<Tensor> {
        let x = self.hidden_states(model, tokens)?;
        let llama = self.clone();
        self.run_unit(model, HEAD_UNIT, &x, move |vb, x| llama.head_logits(&vb, x))
    }

    /// Returns the summed cross-entropy of each token's label given the tokens before it, with the
    /// number of counted labels.
    ///
    /// `labels` [rows, length], `i64`, are not shifted, as in transformers: the first label of a
    /// row is not predicted, and −100 is not counted.
    ///
    /// # Errors
    ///
    /// The errors of [`logits`](Self::logits); also if the shape of the labels differs from the
    /// tokens, or a label is not in the vocabulary.
    pub fn loss(&self, model: &Units, tokens: &Tokens, labels: &Tensor) -> Result<Loss> {
        let targets = shift_labels(labels)?;
        let n_targets = targets.ne(IGNORED)?.to_dtype(DType::F32)?.sum_all()?;
        let x = self.hidden_states(model, tokens)?;
        let llama = self.clone();
        let sum = self.run_unit(model, HEAD_UNIT, &x, move |vb, x| {
            let config = CrossEntropyConfig::default().with_ignore_index(IGNORED);
            let x = llama.norm(&vb)?.forward(x)?;
            Ok(llama.head(&vb)?.cross_entropy(&x, &targets, &config)?.sum)
        })?;
        Ok(Loss::sum(sum, n_targets))
    }

    /// Returns the output of the blocks [rows, length, hidden].
    fn hidden_states(&self, model: &Units, tokens: &Tokens) -> Result<Tensor> {
        self.check_length(tokens)?;
        let llama = self.clone();
        let mut x = model
            .unit(EMBED_UNIT, &tokens.ids, move |vb, ids| llama.embedding(&vb)?.forward(ids))?;
        let context = Context::new(&self.config, tokens, x.dtype())?;
        for layer in 0..self.config.num_hidden_layers {
            let config = self.config.clone();
            let context = context.clone();
            x = self.run_unit(model, &block_name(layer), &x, move |vb, x| {
                Block::new(&config, &vb)?.forward(x, &context)
            })?;
        }
        Ok(x)
    }

    /// Runs a unit, with its adapters applied.
    fn run_unit<F>(&self, model: &Units, name: &str, x: &Tensor, f: F) -> Result<Tensor>
    where
        F: Fn(VarBuilder<'_>, &Tensor) -> Result<Tensor> + Clone + Send + Sync + 'static,
    {
        match &self.lora {
            Some(lora) => model.unit(name, x, lora.unit(f)),
            None => model.unit(name, x, f),
        }
    }

    fn check_length(&self, tokens: &Tokens) -> Result<()> {
        let length = match &tokens.packing {
            None => tokens.ids.dim(1)?,
            Some(Packing { position_ids, .. }) => {
                position_ids.max_all()?.to_scalar::<u32>()? as usize + 1
            }
        };
        let context = self.config.max_position_embeddings;
        if length > context {
            return Err(ModelError::TooLong { length, context }.into());
        }
        Ok(())
    }

    fn embedding(&self, vb: &VarBuilder<'_>) -> Result<Embedding> {
        embedding(self.config.vocab_size, self.config.hidden_size, vb.pp(EMBEDDING))
    }

    fn norm(&self, vb: &VarBuilder<'_>) -> Result<RmsNorm> {
        rms_norm(self.config.hidden_size, self.config.rms_norm_eps, vb.pp(NORM))
    }

    fn head(&self, vb: &VarBuilder<'_>) -> Result<Linear> {
        linear_no_bias(self.config.hidden_size, self.config.vocab_size, vb.pp(self.head_name()))
    }

    /// Returns the name of the head's weight.
    fn head_name(&self) -> &'static str {
        if self.config.tie_word_embeddings { EMBEDDING } else { HEAD }
    }

    /// Applies the last norm and the head, and returns logits.
    fn head_logits(&self, vb: &VarBuilder<'_>, x: &Tensor) -> Result<Tensor> {
        self.head(vb)?.forward(&self.norm(vb)?.forward(x)?)
    }
}

pub(super) fn block_name(layer: usize) -> String {
    format!("model.layers.{layer}")
}

/// Moves each label to the token before it. The last token of a row gets [`IGNORED`].
fn shift_labels(labels: &Tensor) -> Result<Tensor> {
    let (rows, length) = labels.dims2()?;
    let ignored = Tensor::full(IGNORED, (rows, 1), labels.device())?;
    Tensor::cat(&[&labels.narrow(1, 1, length.saturating_sub(1))?, &ignored], 1)
}

/// Inputs that all blocks share.
#[derive(Clone, Debug)]
struct Context {
    cos: Tensor,
    sin: Tensor,
    attention: AttentionConfig,
}

impl Context {
    fn new(config: &LlamaConfig, tokens: &Tokens, dtype: DType) -> Result<Self> {
        let (rows, length) = tokens.ids.dims2()?;
        let (cos, sin) = tables(config, 0..length, dtype, tokens.ids.device())?;
        let attention = AttentionConfig::causal();
        let Some(Packing { segment_ids, position_ids }) = &tokens.packing else {
            return Ok(Self { cos, sin, attention });
        };
        let positions = position_ids.flatten_all()?;
        let select_rows =
            |table: Tensor| table.index_select(&positions, 0)?.reshape((rows, length, ()));
        Ok(Self {
            cos: select_rows(cos)?,
            sin: select_rows(sin)?,
            attention: attention.with_mask(segment_mask(segment_ids, dtype)?),
        })
    }
}

/// Returns a mask [rows, 1, length, length]: 0 within a segment, and −∞ elsewhere.
fn segment_mask(segment_ids: &Tensor, dtype: DType) -> Result<Tensor> {
    let (rows, length) = segment_ids.dims2()?;
    let shape = (rows, 1, length, length);
    let query_ids = segment_ids.reshape((rows, 1, length, 1))?.broadcast_as(shape)?;
    let key_ids = segment_ids.reshape((rows, 1, 1, length))?.broadcast_as(shape)?;
    let device = segment_ids.device();
    let visible = Tensor::zeros(shape, dtype, device)?;
    let hidden = Tensor::full(f32::NEG_INFINITY, shape, device)?.to_dtype(dtype)?;
    query_ids.eq(&key_ids)?.where_cond(&visible, &hidden)
}

/// Attention and a gated feed-forward network, each added to its input.
struct Block {
    input_norm: RmsNorm,
    attention: Attention,
    post_attention_norm: RmsNorm,
    mlp: SwiGlu,
}

impl Block {
    fn new(config: &LlamaConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let hidden = config.hidden_size;
        let norm = |name| rms_norm(hidden, config.rms_norm_eps, vb.pp(name));
        let sizes = AttentionSizes::new(hidden, config.num_attention_heads)
            .with_key_heads(config.num_key_value_heads)
            .with_head_size(config.head_dim)
            .with_bias(config.attention_bias);
        Ok(Self {
            input_norm: norm(INPUT_NORM)?,
            attention: Attention::new(sizes, &vb.pp(ATTENTION))?,
            post_attention_norm: norm(POST_ATTENTION_NORM)?,
            mlp: SwiGlu::new(hidden, config.intermediate_size, &vb.pp(MLP))?,
        })
    }

    fn forward(&self, x: &Tensor, context: &Context) -> Result<Tensor> {
        let Context { cos, sin, attention } = context;
        let normed = self.input_norm.forward(x)?;
        let (sum, normed) = self.attention.forward_add_norm(
            &normed,
            Some((cos, sin)),
            attention,
            x,
            &self.post_attention_norm,
        )?;
        self.mlp.forward_add(&normed, &sum)
    }
}
