//! Text generation with cached keys and values: a prompt in one pass, then one token per pass.

use std::mem;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use fused_ops::{
    embedding,
    layers::{Linear, RmsNorm},
};

use crate::models::{
    block::Block,
    cache::LayerCache,
    config::DecoderConfig,
    layers::norm,
    names::{EMBEDDING, NORM},
    pass::{Pass, PassKind, Positions},
    rope::Span,
};

/// A decoder that reads each token once, in single precision on the CPU.
///
/// The logits are those of [`Decoder`](crate::models::Decoder) within rounding. The bits of a text
/// depend neither on the texts beside it nor on the number of threads.
#[derive(Debug)]
pub(crate) struct CachedDecoder {
    config: DecoderConfig,
    embedding: Tensor,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
}

impl CachedDecoder {
    /// Takes the weights from `vb`, without copies.
    pub(crate) fn new(config: &DecoderConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let DecoderConfig { vocab_size, hidden_size, .. } = *config;
        let block = |layer| Block::new(config, layer, &vb.pp(config.block_name(layer)));
        let matrix = |name: String| vb.pp(name).get((vocab_size, hidden_size), "weight");
        Ok(Self {
            config: config.clone(),
            embedding: matrix(config.full_name(EMBEDDING))?,
            blocks: (0..config.layers.len()).map(block).collect::<Result<_>>()?,
            norm: norm(config, hidden_size, &vb.pp(config.full_name(NORM)))?,
            head: Linear::new(matrix(config.head_name())?, None),
        })
    }

    /// Reads a prompt into an empty cache, and returns the logits [1, vocabulary] after it.
    pub(crate) fn start(&self, prompt: &[u32], cache: &mut TextCache) -> Result<Tensor> {
        in_pool(|| {
            let x = self.run(prompt, &mut [cache], PassKind::Rows)?;
            self.logits(&x.narrow(1, prompt.len() - 1, 1)?)
        })
    }

    /// Reads one more token of each text, and returns the logits [texts, vocabulary] after them.
    ///
    /// A text that becomes long is read again, since its keys have the frequencies of short texts.
    pub(crate) fn advance(&self, ids: &[u32], caches: &mut [&mut TextCache]) -> Result<Tensor> {
        if !caches.iter().any(|cache| self.becomes_long(cache)) {
            return in_pool(|| self.logits(&self.run(ids, caches, PassKind::Token)?));
        }
        // A text has the same bits alone.
        let mut logits = Vec::with_capacity(ids.len());
        for (cache, &id) in caches.iter_mut().zip(ids) {
            logits.push(if self.becomes_long(cache) {
                let read = mem::take(*cache).ids;
                self.start(&[&read[..], &[id]].concat(), cache)?
            } else {
                in_pool(|| self.logits(&self.run(&[id], &mut [cache], PassKind::Token)?))?
            });
        }
        Tensor::cat(&logits, 0)
    }

    /// Returns true if the frequencies change with the next token of a text.
    fn becomes_long(&self, cache: &TextCache) -> bool {
        let length = cache.ids.len();
        self.config.ropes.iter().any(|rope| rope.scaling.becomes_long(length))
    }

    /// Returns the output of the blocks [1, tokens, hidden]. All texts have the same number of new
    /// tokens.
    fn run(&self, ids: &[u32], caches: &mut [&mut TextCache], kind: PassKind) -> Result<Tensor> {
        let n_new = ids.len() / caches.len();
        for (cache, ids) in caches.iter_mut().zip(ids.chunks(n_new)) {
            cache.layers.resize_with(self.blocks.len(), LayerCache::default);
            cache.ids.extend_from_slice(ids);
        }
        let span = |cache: &&mut TextCache| {
            let context = cache.ids.len();
            Span { positions: context - n_new..context, context }
        };
        let spans: Vec<_> = caches.iter().map(span).collect();
        let positions = &Positions::new(&self.config, &spans, DType::F32, &Device::Cpu)?;
        let x = embedding(&self.embedding, &Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?)?;
        let mut x = self.config.scale_embeddings(x)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            let caches = caches.iter_mut().map(|cache| &mut cache.layers[layer]).collect();
            x = block.forward(&x, Pass { kind, positions, mask: None, caches })?;
        }
        Ok(x)
    }

    /// Returns the logits [tokens, vocabulary] for `x` [1, tokens, hidden].
    fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let normed = self.norm.forward(&x.squeeze(0)?)?;
        let [logits] = PassKind::Token.project(&normed, [&self.head])?;
        self.config.finish_logits(logits)
    }
}

/// Runs a pass on a thread of the pool: an operation that begins there need not wake it.
fn in_pool<R: Send>(pass: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| pass())
}

/// A text that a decoder has read.
#[derive(Debug, Default)]
pub(crate) struct TextCache {
    /// All tokens.
    ids: Vec<u32>,
    layers: Vec<LayerCache>,
}
