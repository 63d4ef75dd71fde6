//! Text generation with cached keys and values: a prompt in one pass, then one token per pass.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use fused_ops::{
    AttentionConfig, add_rms_norm, attention, embedding, linear, linear_decode, rms_norm, rope_thd,
    swiglu,
};

use crate::models::{
    config::LlamaConfig,
    llama::{ATTENTION, EMBEDDING, HEAD, INPUT_NORM, MLP, NORM, POST_ATTENTION_NORM, block_name},
    rope::tables,
};

/// A model of the Llama family that reads each token once, in single precision on the CPU.
///
/// The logits are those of [`Llama`](crate::models::Llama) within rounding. The bits of a text
/// depend neither on the texts beside it nor on the number of threads.
#[derive(Debug)]
pub(crate) struct Decoder {
    config: LlamaConfig,
    embedding: Tensor,
    blocks: Vec<DecoderBlock>,
    norm: Tensor,
    head: Projection,
}

impl Decoder {
    /// Takes the weights from `vb`, without copies.
    pub(crate) fn new(config: &LlamaConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let LlamaConfig { vocab_size, hidden_size, .. } = *config;
        let mut blocks = Vec::with_capacity(config.num_hidden_layers);
        for layer in 0..config.num_hidden_layers {
            blocks.push(DecoderBlock::new(config, &vb.pp(block_name(layer)))?);
        }
        let head = if config.tie_word_embeddings { EMBEDDING } else { HEAD };
        Ok(Self {
            config: config.clone(),
            embedding: vb.pp(EMBEDDING).get((vocab_size, hidden_size), "weight")?,
            blocks,
            norm: vb.pp(NORM).get(hidden_size, "weight")?,
            head: Projection::new([vocab_size, hidden_size], false, &vb.pp(head))?,
        })
    }

    /// Reads a prompt into an empty cache, and returns the logits [1, vocabulary] after it.
    pub(crate) fn start(&self, prompt: &[u32], cache: &mut TextCache) -> Result<Tensor> {
        in_pool(|| {
            let x = self.run(prompt, &mut [cache], PassKind::Prompt)?;
            self.logits(&x.narrow(1, prompt.len() - 1, 1)?)
        })
    }

    /// Reads one more token of each text, and returns the logits [texts, vocabulary] after them.
    pub(crate) fn advance(&self, ids: &[u32], caches: &mut [&mut TextCache]) -> Result<Tensor> {
        in_pool(|| self.logits(&self.run(ids, caches, PassKind::Token)?))
    }

    /// Returns the output of the blocks [1, tokens, hidden]. All texts have the same number of new
    /// tokens.
    fn run(&self, ids: &[u32], caches: &mut [&mut TextCache], kind: PassKind) -> Result<Tensor> {
        let n_new = ids.len() / caches.len();
        let positions = caches.iter().flat_map(|cache| cache.length..cache.length + n_new);
        let rotation = tables(&self.config, positions, DType::F32, &Device::Cpu)?;
        let mut x = embedding(&self.embedding, &Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?)?;
        for cache in &mut *caches {
            cache.layers.resize_with(self.blocks.len(), LayerCache::default);
            cache.length += n_new;
        }
        let epsilon = self.config.rms_norm_eps;
        for (layer, block) in self.blocks.iter().enumerate() {
            let caches = caches.iter_mut().map(|cache| &mut cache.layers[layer]);
            let pass = BlockPass { kind, epsilon, rotation: &rotation, caches: caches.collect() };
            x = block.forward(&x, pass)?;
        }
        Ok(x)
    }

    /// Returns the logits [tokens, vocabulary] for `x` [1, tokens, hidden].
    fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let normed = rms_norm(&x.squeeze(0)?, &self.norm, self.config.rms_norm_eps)?;
        Ok(linear_decode(&normed, &[self.head.layer()])?.swap_remove(0))
    }
}

/// Runs a pass on a thread of the pool: an operation that begins there need not wake it.
fn in_pool<R: Send>(pass: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| pass())
}

/// The kind of a pass, which decides how products are computed.
#[derive(Clone, Copy, Debug)]
enum PassKind {
    /// Many rows, by matrix products.
    Prompt,
    /// A row for each text, at the speed of memory.
    Token,
}

impl PassKind {
    /// Applies linear layers to `x`.
    fn project(self, x: &Tensor, projections: &[&Projection]) -> Result<Vec<Tensor>> {
        let layers: Vec<_> = projections.iter().map(|projection| projection.layer()).collect();
        Ok(match self {
            Self::Prompt => layers
                .iter()
                .map(|&(weight, bias)| linear(x, weight, bias, None))
                .collect::<fused_ops::Result<_>>()?,
            Self::Token => linear_decode(x, &layers)?,
        })
    }
}

/// The weights of a linear layer.
#[derive(Debug)]
struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Projection {
    fn new(shape: [usize; 2], has_bias: bool, vb: &VarBuilder<'_>) -> Result<Self> {
        let weight = vb.get(&shape[..], "weight")?;
        let bias = if has_bias { Some(vb.get(shape[0], "bias")?) } else { None };
        Ok(Self { weight, bias })
    }

    fn layer(&self) -> (&Tensor, Option<&Tensor>) {
        (&self.weight, self.bias.as_ref())
    }
}

/// The weights of a block.
#[derive(Debug)]
struct DecoderBlock {
    head_dim: usize,
    input_norm: Tensor,
    query: Projection,
    key: Projection,
    value: Projection,
    output: Projection,
    post_attention_norm: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
}

/// The parts of a pass that a block needs besides its input.
struct BlockPass<'a> {
    kind: PassKind,
    epsilon: f64,
    /// Cosines and sines of all tokens.
    rotation: &'a (Tensor, Tensor),
    caches: Vec<&'a mut LayerCache>,
}

impl DecoderBlock {
    fn new(config: &LlamaConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let &LlamaConfig { hidden_size: hidden, intermediate_size: inner, head_dim, .. } = config;
        let queries = config.num_attention_heads * head_dim;
        let keys = config.num_key_value_heads * head_dim;
        let (attention, mlp) = (vb.pp(ATTENTION), vb.pp(MLP));
        let has_bias = config.attention_bias;
        Ok(Self {
            head_dim,
            input_norm: vb.pp(INPUT_NORM).get(hidden, "weight")?,
            query: Projection::new([queries, hidden], has_bias, &attention.pp("q_proj"))?,
            key: Projection::new([keys, hidden], has_bias, &attention.pp("k_proj"))?,
            value: Projection::new([keys, hidden], has_bias, &attention.pp("v_proj"))?,
            output: Projection::new([hidden, queries], false, &attention.pp("o_proj"))?,
            post_attention_norm: vb.pp(POST_ATTENTION_NORM).get(hidden, "weight")?,
            gate: Projection::new([inner, hidden], false, &mlp.pp("gate_proj"))?,
            up: Projection::new([inner, hidden], false, &mlp.pp("up_proj"))?,
            down: Projection::new([hidden, inner], false, &mlp.pp("down_proj"))?,
        })
    }

    /// Applies the block to `x` [1, tokens, hidden].
    fn forward(&self, x: &Tensor, pass: BlockPass<'_>) -> Result<Tensor> {
        let BlockPass { kind, epsilon, .. } = pass;
        let normed = rms_norm(x, &self.input_norm, epsilon)?;
        let projected = kind.project(&normed, &[&self.query, &self.key, &self.value])?;
        let attended = self.attend(&projected, pass)?;
        let output = kind.project(&attended, &[&self.output])?;
        let (sum, normed) = add_rms_norm(&output[0], x, &self.post_attention_norm, epsilon)?;
        let gated = kind.project(&normed, &[&self.gate, &self.up])?;
        let down = kind.project(&swiglu(&gated[0], &gated[1])?, &[&self.down])?;
        sum + &down[0]
    }

    /// Caches the new keys and values, and returns the results of the heads [1, tokens, queries].
    fn attend(&self, projected: &[Tensor], pass: BlockPass<'_>) -> Result<Tensor> {
        let (cos, sin) = pass.rotation;
        let n_tokens = projected[0].dim(1)?;
        let heads = |x: &Tensor| x.reshape((1, n_tokens, (), self.head_dim));
        let query = rope_thd(&heads(&projected[0])?, cos, sin)?;
        let key = rope_thd(&heads(&projected[1])?, cos, sin)?;
        let value = heads(&projected[2])?;
        let n_new = n_tokens / pass.caches.len();
        let mut attended = Vec::with_capacity(pass.caches.len());
        for (text, cache) in pass.caches.into_iter().enumerate() {
            let rows = |x: &Tensor| x.narrow(1, text * n_new, n_new);
            let keys = cache.keys.append(&rows(&key)?)?;
            let values = cache.values.append(&rows(&value)?)?;
            let causal = AttentionConfig::causal();
            attended.push(attention(&rows(&query)?, &keys, &values, &causal)?);
        }
        Tensor::cat(&attended, 1)?.flatten_from(2)
    }
}

/// The keys and values of a text's tokens.
#[derive(Debug, Default)]
pub(crate) struct TextCache {
    /// Number of tokens.
    length: usize,
    layers: Vec<LayerCache>,
}

/// The keys, with their rotation, and the values of a layer.
#[derive(Debug, Default)]
struct LayerCache {
    keys: GrowingRows,
    values: GrowingRows,
}

/// A tensor [1, capacity, key heads, head size] that doubles when it is full.
#[derive(Debug, Default)]
struct GrowingRows {
    memory: Option<Tensor>,
    length: usize,
}

impl GrowingRows {
    /// Appends rows, and returns a view of all rows.
    fn append(&mut self, new: &Tensor) -> Result<Tensor> {
        let (_, n_new, heads, size) = new.dims4()?;
        let length = self.length + n_new;
        let memory = match self.memory.take() {
            // The rows of a prompt need no copy.
            None => new.contiguous()?,
            Some(memory) => {
                let capacity = memory.dim(1)?;
                let memory = if length > capacity {
                    let shape = (1, length.max(2 * capacity), heads, size);
                    let larger = Tensor::zeros(shape, new.dtype(), new.device())?;
                    larger.slice_set(&memory.narrow(1, 0, self.length)?, 1, 0)?;
                    larger
                } else {
                    memory
                };
                memory.slice_set(&new.contiguous()?, 1, self.length)?;
                memory
            }
        };
        self.length = length;
        self.memory.insert(memory).narrow(1, 0, length)
    }
}
