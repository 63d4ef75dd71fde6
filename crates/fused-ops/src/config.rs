//! Settings of operations.

use candle_core::Tensor;

/// A function that is applied to each element; [`linear`](crate::linear()) fuses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// max(x, 0); its slope at 0 is 0, as in PyTorch (candle's is 1).
    Relu,
    /// x·Φ(x), Φ being the distribution function of the standard normal.
    Gelu,
    /// The approximation of [`Gelu`](Self::Gelu) by a hyperbolic tangent, with an error of up to
    /// 0.0005: the GELU of GPT-2, and of candle's `Tensor::gelu`.
    GeluTanh,
    /// x / (1 + e^−x), also called swish.
    Silu,
}

/// The options of [`attention`](crate::attention()) and
/// [`attention_packed`](crate::attention_packed).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct AttentionConfig {
    /// Hides keys of later positions from a query. Default: `false`.
    ///
    /// The last query has the position of the last key. If there are fewer queries than keys, the
    /// queries are the end of the sequence. (PyTorch's `is_causal` aligns the first query with the
    /// first key instead. For equal numbers of queries and keys the two agree.)
    pub causal: bool,
    /// The factor of q·kᵀ. Default: `None`, 1 / √(head size).
    pub scale: Option<f64>,
    /// The number of keys of each sequence in the batch; later keys are padding, hidden from every
    /// query. Default: `None`, no padding.
    pub key_lengths: Option<Vec<usize>>,
    /// The mask to add to the scores, of any shape that broadcasts to [batch, heads, queries,
    /// keys]. Default: `None`.
    ///
    /// It gets no gradient. If all scores of a query are −∞, its result is NaN, as without fusion.
    pub mask: Option<Tensor>,
    /// The number of keys that a query sees, itself included: the query at position i sees the keys
    /// at the positions j with i − window < j ≤ i. Only with [`causal`](Self::causal). Default:
    /// `None`, all earlier keys.
    ///
    /// Positions are indices of keys, so rows of several packed sequences need a mask as well. The
    /// blocks of keys outside of the window are not computed. A query of the padding whose window has
    /// only padding sees the last key of its sequence.
    ///
    /// Beltagy et al., "Longformer", arXiv 2004.05150; Jiang et al., "Mistral 7B", arXiv 2310.06825.
    pub window: Option<usize>,
    /// The bound c of a score s, which becomes c·tanh(s / c) after the scale and before the mask.
    /// Default: `None`.
    ///
    /// Gemma Team, "Gemma 2", arXiv 2408.00118.
    pub softcap: Option<f64>,
    /// One more logit for each query head \[heads\], of any floating type: a key without a value. The
    /// softmax includes it, and its weight is dropped, so a head may attend to nothing. It has a
    /// gradient. Default: `None`.
    ///
    /// Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453; the
    /// learned form is gpt-oss's.
    pub sinks: Option<Tensor>,
}

impl AttentionConfig {
    /// Hides the keys of later positions from each query.
    #[must_use]
    pub fn causal() -> Self {
        Self { causal: true, ..Self::default() }
    }

    /// Hides the padding of sequences of these lengths.
    #[must_use]
    pub fn with_key_lengths(mut self, lengths: Vec<usize>) -> Self {
        self.key_lengths = Some(lengths);
        self
    }

    /// Adds `mask` to the scores.
    #[must_use]
    pub fn with_mask(mut self, mask: Tensor) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Hides the keys before the last `window` keys of each query, itself included: see
    /// [`window`](Self::window).
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fused_ops::{AttentionConfig, attention};
    ///
    /// // Three positions, one head of size 1, equal scores: each sees itself and the one before.
    /// let zeros = Tensor::zeros((1, 3, 1, 1), candle_core::DType::F32, &Device::Cpu)?;
    /// let value = Tensor::new(&[10.0_f32, 20.0, 40.0], &Device::Cpu)?.reshape((1, 3, 1, 1))?;
    /// let config = AttentionConfig::causal().with_window(2);
    /// let y = attention(&zeros, &zeros, &value, &config)?;
    /// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [10.0, 15.0, 30.0]);
    /// // A sink with the same logit takes its share.
    /// let config = config.with_sinks(Tensor::zeros(1, candle_core::DType::F32, &Device::Cpu)?);
    /// let y = attention(&zeros, &zeros, &value, &config)?;
    /// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [5.0, 10.0, 20.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_window(mut self, window: usize) -> Self {
        self.window = Some(window);
        self
    }

    /// Bounds the scores: see [`softcap`](Self::softcap).
    #[must_use]
    pub fn with_softcap(mut self, cap: f64) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// Adds a logit \[heads\] without a value to each softmax: see [`sinks`](Self::sinks).
    #[must_use]
    pub fn with_sinks(mut self, sinks: Tensor) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Returns the factor of q·kᵀ for heads of `size`.
    pub(crate) fn scale(&self, size: usize) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (size as f64).sqrt())
    }
}

/// The key of the random numbers that choose the dropped elements.
///
/// The same key drops the same elements, so each dropout of a run needs a different `call`, for
/// example step · layers + layer.
///
/// With the right `offset`, a slice of a tensor, such as the rows of one device, drops the same
/// elements as the full tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(
    clippy::exhaustive_structs,
    reason = "a seed, a stream and a position identify a random number"
)]
pub struct DropoutKey {
    /// The seed of the run.
    pub seed: u64,
    /// The number of this dropout among all dropouts with this seed.
    pub call: u64,
    /// The index of the slice's first element in the full tensor; 0 for a full tensor.
    pub offset: u64,
}
