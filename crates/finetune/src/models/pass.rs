//! A pass of tokens through the blocks, in training or in generation.

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::Module;
use fused_ops::{layers::Linear, linear_decode};

use crate::models::{cache::LayerCache, config::DecoderConfig, rope::Span};

/// How a pass computes its products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PassKind {
    /// Many rows, by matrix products: training, and the prompts of generation.
    Rows,
    /// A row for each text, at the speed of memory.
    Token,
}

impl PassKind {
    /// Applies linear layers to `x`.
    pub(super) fn project<const N: usize>(
        self,
        x: &Tensor,
        layers: [&Linear; N],
    ) -> Result<[Tensor; N]> {
        let results = match self {
            Self::Rows => {
                layers.iter().map(|layer| layer.forward(x)).collect::<Result<Vec<_>>>()?
            }
            Self::Token => linear_decode(x, &layers.map(|layer| (layer.weight(), layer.bias())))?,
        };
        let expected =
            |results: Vec<Tensor>| Error::Msg(format!("{} results, not {N}", results.len()));
        results.try_into().map_err(expected)
    }
}

/// The parts of a pass that depend on the positions of its tokens.
#[derive(Clone, Debug)]
pub(super) struct Positions {
    /// Cosines and sines of each of the [ropes](DecoderConfig::ropes): [positions, pairs], or [rows,
    /// positions, pairs] if rows have positions of their own.
    rotations: Vec<(Tensor, Tensor)>,
    /// The factors of queries [.., positions, 1, 1].
    query_scale: Option<Tensor>,
}

impl Positions {
    /// Computes the tables of all positions of some spans.
    #[expect(clippy::cast_possible_truncation, reason = "rounding is intended")]
    pub(super) fn new(
        config: &DecoderConfig,
        spans: &[Span],
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let rotations = config.ropes.iter().map(|rope| rope.tables(spans, dtype, device));
        let rotations = rotations.collect::<Result<_>>()?;
        let query_scale = config.query_scale.map(|scale| {
            let positions = spans.iter().flat_map(|span| span.positions.clone());
            let factors: Vec<f32> = positions.map(|at| scale.at(at) as f32).collect();
            Tensor::from_vec(factors, ((), 1, 1), device)?.to_dtype(dtype)
        });
        Ok(Self { rotations, query_scale: query_scale.transpose()? })
    }

    /// Selects the positions of each token: `ids` [rows, length].
    pub(super) fn select(&self, ids: &Tensor) -> Result<Self> {
        let (rows, length) = ids.dims2()?;
        let flat = ids.flatten_all()?;
        let select = |table: &Tensor| {
            let dims = [&[rows, length], &table.dims()[1..]].concat();
            table.index_select(&flat, 0)?.reshape(dims)
        };
        let rotations = self.rotations.iter().map(|(cos, sin)| Ok((select(cos)?, select(sin)?)));
        Ok(Self {
            rotations: rotations.collect::<Result<_>>()?,
            query_scale: self.query_scale.as_ref().map(select).transpose()?,
        })
    }

    /// Returns the cosines and sines of a rope.
    pub(super) fn rotation(&self, rope: usize) -> (&Tensor, &Tensor) {
        let (cos, sin) = &self.rotations[rope];
        (cos, sin)
    }

    /// Multiplies queries [rows, length, heads, size] by the factors of their positions.
    pub(super) fn scale_query(&self, query: Tensor) -> Result<Tensor> {
        match &self.query_scale {
            None => Ok(query),
            Some(factors) => query.broadcast_mul(factors),
        }
    }

    /// Returns true if queries have factors.
    pub(super) fn scales_queries(&self) -> bool {
        self.query_scale.is_some()
    }
}

/// The parts of a pass that a block needs besides its input.
pub(super) struct Pass<'a> {
    pub(super) kind: PassKind,
    pub(super) positions: &'a Positions,
    /// The mask of packed rows.
    pub(super) mask: Option<&'a Tensor>,
    /// The layer's caches of the texts whose tokens stand side by side; none in training.
    pub(super) caches: Vec<&'a mut LayerCache>,
}
