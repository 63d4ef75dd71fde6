//! Attention of a block between its projections.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};
use fused_ops::{
    AttentionConfig, attention,
    layers::{Linear, RmsNorm},
    rope_i_thd, rope_thd,
};

use crate::models::{
    config::{DecoderConfig, QkNorm},
    layers::{linear, linears, norm},
    names::{ATTENTION, KEY_NORM, QUERY_NORM, SINKS},
    pass::{Pass, PassKind, Positions},
    rope::RopePairs,
};

#[derive(Debug)]
pub(super) struct Attention {
    /// To queries, keys and values.
    projections: [Linear; 3],
    head_dim: usize,
    /// Norms of queries and keys.
    norms: Option<(QkNorm, [RmsNorm; 2])>,
    /// Index of the rope, and the elements that turn.
    rope: Option<(usize, RopePairs)>,
    config: AttentionConfig,
    pub(super) output: Linear,
}

impl Attention {
    pub(super) fn new(config: &DecoderConfig, layer: usize, vb: &VarBuilder<'_>) -> Result<Self> {
        let vb = &vb.pp(ATTENTION);
        let layer = config.layers[layer];
        let norms = config.qk_norm_sizes().map(|(kind, [query, key])| -> Result<_> {
            let norm = |name, size| norm(config, size, &vb.pp(name));
            Ok((kind, [norm(QUERY_NORM, query)?, norm(KEY_NORM, key)?]))
        });
        let mut attention = AttentionConfig::causal();
        attention.scale = Some(config.attention_scale);
        attention.window = layer.window;
        attention.softcap = config.attention_softcap;
        if config.sinks {
            attention.sinks = Some(vb.get(config.num_attention_heads, SINKS)?);
        }
        let (queries, keys) = (config.query_width(), config.key_width());
        Ok(Self {
            projections: linears(config.input_projections(), [queries, keys, keys], vb)?,
            head_dim: config.head_dim,
            norms: norms.transpose()?,
            rope: layer.rope.map(|rope| (rope, config.ropes[rope].pairs)),
            config: attention,
            output: linear(config.output_projection(), vb)?,
        })
    }

    /// Returns the results of the heads [rows, length, heads · size], before their projection.
    pub(super) fn attend(&self, x: &Tensor, pass: &mut Pass<'_>) -> Result<Tensor> {
        let [query, key, value] = self.heads(x, pass)?;
        if pass.caches.is_empty() {
            let config = match pass.mask {
                None => &self.config,
                Some(mask) => &self.config.clone().with_mask(mask.clone()),
            };
            return attention(&query, &key, &value, config)?.flatten_from(2);
        }
        let n_new = query.dim(1)? / pass.caches.len();
        let mut attended = Vec::with_capacity(pass.caches.len());
        for (text, cache) in pass.caches.iter_mut().enumerate() {
            let rows = |x: &Tensor| x.narrow(1, text * n_new, n_new);
            let (keys, values) = cache.append(&rows(&key)?, &rows(&value)?, self.config.window)?;
            attended.push(attention(&rows(&query)?, &keys, &values, &self.config)?);
        }
        Tensor::cat(&attended, 1)?.flatten_from(2)
    }

    /// Returns queries, keys and values [rows, length, heads, size], with their positions.
    fn heads(&self, x: &Tensor, pass: &Pass<'_>) -> Result<[Tensor; 3]> {
        let [query, key, value] = self.projections.each_ref();
        if let Some(rotation) = self.fused_rotation(pass) {
            let rotate = |layer: &Linear| layer.forward_rope(x, self.head_dim, rotation);
            return Ok([rotate(query)?, rotate(key)?, self.split_heads(&value.forward(x)?)?]);
        }
        let [query, key, value] = pass.kind.project(x, [query, key, value])?;
        let [query, key] = self.norm_heads(&query, &key)?;
        let query = pass.positions.scale_query(self.rotate(query, pass.positions)?)?;
        Ok([query, self.rotate(key, pass.positions)?, self.split_heads(&value)?])
    }

    /// Returns the cosines and sines if nothing comes between the projections and the rotation.
    fn fused_rotation<'a>(&self, pass: &'a Pass<'_>) -> Option<(&'a Tensor, &'a Tensor)> {
        let is_plain = self.norms.is_none() && !pass.positions.scales_queries();
        match self.rope {
            Some((rope, RopePairs::Halves)) if is_plain && pass.kind == PassKind::Rows => {
                Some(pass.positions.rotation(rope))
            }
            _ => None,
        }
    }

    fn norm_heads(&self, query: &Tensor, key: &Tensor) -> Result<[Tensor; 2]> {
        Ok(match &self.norms {
            None => [self.split_heads(query)?, self.split_heads(key)?],
            Some((QkNorm::PerHead, [query_norm, key_norm])) => [
                query_norm.forward(&self.split_heads(query)?)?,
                key_norm.forward(&self.split_heads(key)?)?,
            ],
            Some((QkNorm::AllHeads, [query_norm, key_norm])) => [
                self.split_heads(&query_norm.forward(query)?)?,
                self.split_heads(&key_norm.forward(key)?)?,
            ],
        })
    }

    /// Returns `x` [rows, length, width] as [rows, length, heads, size].
    fn split_heads(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, length, _) = x.dims3()?;
        x.reshape((rows, length, (), self.head_dim))
    }

    /// Rotates heads [rows, length, heads, size] by the angles of their positions.
    fn rotate(&self, x: Tensor, positions: &Positions) -> Result<Tensor> {
        let Some((rope, pairs)) = self.rope else { return Ok(x) };
        let rotate = match pairs {
            RopePairs::Halves => rope_thd,
            RopePairs::Neighbors => rope_i_thd,
        };
        let (cos, sin) = positions.rotation(rope);
        if cos.rank() < 3 {
            return Ok(rotate(&x, cos, sin)?);
        }
        // All rows have the same angles in a rotation, so join the rows to one long row.
        let joined = x.flatten_to(1)?.unsqueeze(0)?;
        rotate(&joined, &cos.flatten_to(1)?, &sin.flatten_to(1)?)?.reshape(x.shape())
    }
}
