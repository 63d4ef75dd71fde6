//! A decoder for training.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use dist_train::{Lora, Loss, UnitRules, Units};
use fused_ops::{
    CrossEntropyConfig,
    layers::{Linear, embedding, linear_no_bias},
};

use crate::models::{
    block::Block,
    config::DecoderConfig,
    error::ModelError,
    layers::norm,
    names::{EMBED_UNIT, EMBEDDING, HEAD, HEAD_UNIT, NORM, OTHER_PARTS, Variable},
    pass::{Pass, PassKind, Positions},
    rope::Span,
    tokens::{Packing, Tokens},
};

/// The label of a token that is not a target, as in PyTorch.
const IGNORED: i64 = -100;

/// A decoder with its variables in [`Units`]: the embedding is the unit `embed`, each block is a unit
/// (`model.layers.0`), and the last norm and the head form the unit `head`.
///
/// See the [module's](crate::models) example.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: DecoderConfig,
    context: usize,
    lora: Option<Lora>,
}

impl Decoder {
    /// Makes a model with the sizes and formulas of a configuration.
    ///
    /// # Errors
    ///
    /// [`ModelError::Field`] if a number is out of range.
    pub fn from_config(config: DecoderConfig) -> std::result::Result<Self, ModelError> {
        config.check()?;
        Ok(Self { context: config.max_position_embeddings, config, lora: None })
    }

    /// Says that no text has more than `context` tokens. Default: the positions of the model.
    ///
    /// Models with LongRoPE have other frequencies for long texts, and this length decides which a run
    /// takes: if each batch decided by its own length, as in transformers, the loss of a text would
    /// depend on the texts beside it.
    #[must_use]
    pub fn with_context(self, context: usize) -> Self {
        Self { context, ..self }
    }

    /// Adds adapters to the layers that they name (`q_proj`, `gate_proj`, …):
    /// [`declare`](Self::declare) requests their variables too, and [`logits`](Self::logits) and
    /// [`loss`](Self::loss) apply them.
    ///
    /// # Errors
    ///
    /// [`ModelError::Adapter`] for the embedding, for a head that is tied to it (a merged adapter would
    /// change both, while training would apply it to the head only), and for experts and their router.
    pub fn with_lora(self, lora: Lora) -> std::result::Result<Self, ModelError> {
        if let Some((layer, reason)) =
            self.config.unadaptable().into_iter().find(|(layer, _)| lora.adapts(layer))
        {
            return Err(ModelError::Adapter { layer, reason });
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
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Requests all variables by their names in Hugging Face folders. Pass it as the constructor to
    /// [`DataParallel::builder`](dist_train::DataParallel::builder) or
    /// [`FullyShard::builder`](dist_train::FullyShard::builder).
    ///
    /// Random values are as in transformers: matrices are normal with the standard deviation
    /// [`initializer_range`](DecoderConfig::initializer_range), norms 1 (with the offset of Gemma), biases
    /// 0. Folders of the first Llamas also contain frequencies, which `.allow_unexpected(["rotary_emb"])` of a builder skips.
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
        declare(&self.config.other_variables(), vb)?;
        (0..self.config.layers.len()).try_for_each(|layer| {
            declare(&self.config.block_variables(layer), &vb.pp(self.config.block_name(layer)))
        })
    }

    /// Returns patterns of the variables that usually have no weight decay, norms and biases:
    /// `.group("no_decay", decoder.undecayed())` of a builder. Patterns match whole components of a name.
    #[must_use]
    pub fn undecayed(&self) -> Vec<&'static str> {
        self.config.undecayed()
    }

    /// Returns the rules that assign variables to units. Each numbered block is a unit by default.
    pub fn units(&self) -> UnitRules {
        let [embedding, norm] = [EMBEDDING, NORM].map(|layer| self.config.full_name(layer));
        let head = [norm, self.config.head_name()];
        UnitRules::new().unit(EMBED_UNIT, [embedding]).unit(HEAD_UNIT, head)
    }

    /// Returns patterns of tensors that weight files may contain although the model has no such
    /// variables: frequencies in folders of the first Llamas, a tied head, and the
    /// [other parts](Self::other_parts) of the model.
    pub(crate) fn unexpected_weights(&self) -> Vec<&'static str> {
        let head = self.config.tie_word_embeddings.then_some(HEAD);
        let others = self.other_parts().iter().copied();
        ["rotary_emb"].into_iter().chain(head).chain(others).collect()
    }

    /// Returns patterns of the weights that a saved folder must also contain: those of the parts that see
    /// images.
    pub(crate) fn other_parts(&self) -> &'static [&'static str] {
        if self.config.name_prefix.is_empty() { &[] } else { &OTHER_PARTS }
    }

    /// Returns next-token logits [rows, length, vocabulary].
    ///
    /// # Errors
    ///
    /// [`ModelError::TooLong`] for more tokens than positions, and the errors of [`Units::unit`].
    pub fn logits(&self, model: &Units, tokens: &Tokens) -> Result<Tensor> {
        let x = self.hidden_states(model, tokens)?;
        let decoder = self.clone();
        self.run_unit(model, HEAD_UNIT, &x, move |vb, x| {
            let x = decoder.norm(&vb, x)?;
            decoder.config.finish_logits(decoder.head(&vb)?.forward(&x)?)
        })
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
        let decoder = self.clone();
        let sum = self.run_unit(model, HEAD_UNIT, &x, move |vb, x| {
            let x = decoder.norm(&vb, x)?;
            let config = decoder.cross_entropy();
            Ok(decoder.head(&vb)?.cross_entropy(&x, &targets, &config)?.sum)
        })?;
        Ok(Loss::sum(sum, n_targets))
    }

    /// Returns the output of the blocks [rows, length, hidden].
    fn hidden_states(&self, model: &Units, tokens: &Tokens) -> Result<Tensor> {
        self.check_length(tokens)?;
        let decoder = self.clone();
        let mut x = model.unit(EMBED_UNIT, &tokens.ids, move |vb, ids| decoder.embed(&vb, ids))?;
        let context = Context::new(self, tokens, x.dtype())?;
        for layer in 0..self.config.layers.len() {
            let config = self.config.clone();
            let context = context.clone();
            x = self.run_unit(model, &self.config.block_name(layer), &x, move |vb, x| {
                Block::new(&config, layer, &vb)?.forward(x, context.pass())
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

    fn embed(&self, vb: &VarBuilder<'_>, ids: &Tensor) -> Result<Tensor> {
        let DecoderConfig { vocab_size, hidden_size, .. } = self.config;
        let vb = vb.pp(self.config.full_name(EMBEDDING));
        let x = embedding(vocab_size, hidden_size, vb)?.forward(ids)?;
        self.config.scale_embeddings(x)
    }

    /// Applies the last norm.
    fn norm(&self, vb: &VarBuilder<'_>, x: &Tensor) -> Result<Tensor> {
        let vb = vb.pp(self.config.full_name(NORM));
        norm(&self.config, self.config.hidden_size, &vb)?.forward(x)
    }

    fn head(&self, vb: &VarBuilder<'_>) -> Result<Linear> {
        let DecoderConfig { vocab_size, hidden_size, .. } = self.config;
        linear_no_bias(hidden_size, vocab_size, vb.pp(self.config.head_name()))
    }

    fn cross_entropy(&self) -> CrossEntropyConfig {
        let config = CrossEntropyConfig::default().with_ignore_index(IGNORED);
        let config = config.with_logit_scale(self.config.logit_scale);
        match self.config.logit_softcap {
            None => config,
            Some(cap) => config.with_softcap(cap),
        }
    }
}

/// Requests variables by their names.
fn declare(variables: &[Variable], vb: &VarBuilder<'_>) -> Result<()> {
    for Variable { layer, name, shape, init } in variables {
        vb.pp(layer).get_with_hints(&shape[..], name, *init)?;
    }
    Ok(())
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
    positions: Positions,
    /// The mask of packed rows.
    mask: Option<Tensor>,
}

impl Context {
    fn new(decoder: &Decoder, tokens: &Tokens, dtype: DType) -> Result<Self> {
        let span = Span { positions: 0..tokens.ids.dim(1)?, context: decoder.context };
        let device = tokens.ids.device();
        let positions = Positions::new(&decoder.config, &[span], dtype, device)?;
        let Some(Packing { segment_ids, position_ids }) = &tokens.packing else {
            return Ok(Self { positions, mask: None });
        };
        let positions = positions.select(position_ids)?;
        Ok(Self { positions, mask: Some(segment_mask(segment_ids, dtype)?) })
    }

    fn pass(&self) -> Pass<'_> {
        let Self { positions, mask } = self;
        Pass { kind: PassKind::Rows, positions, mask: mask.as_ref(), caches: Vec::new() }
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
