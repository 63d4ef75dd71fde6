//! Rotary positions: frequencies, and tables of cosines and sines.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use crate::models::{
    error::{ModelError, field_error},
    scaling::RopeScaling,
};

/// The rotary positions of a block (Su et al., arXiv 2104.09864).
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "a description of plain data")]
pub struct RopeConfig {
    /// The base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies for long contexts.
    pub scaling: RopeScaling,
    /// The number of first elements of a head that turn, an even number; the others stay as they are.
    pub rotated: usize,
    /// The elements that form a pair.
    pub pairs: RopePairs,
}

/// Consecutive positions of a text.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) positions: Range<usize>,
    /// The length that decides whether the text is long: see [`RopeScaling::LongRope`].
    pub(super) context: usize,
}

/// The elements of a head that turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RopePairs {
    /// An element of the first half and the element at the same index of the second half.
    Halves,
    /// Two neighbors, as in GLM 4.
    Neighbors,
}

impl RopeConfig {
    pub(super) fn check(&self, head_dim: usize) -> Result<(), ModelError> {
        if !(self.theta > 0. && self.theta.is_finite()) {
            return Err(field_error("rope_theta", &self.theta, "a positive number".into()));
        }
        if !self.rotated.is_multiple_of(2) {
            let field = if self.rotated == head_dim { "head_dim" } else { "the rotated width" };
            return Err(field_error(field, &self.rotated, "even".into()));
        }
        if !(2..=head_dim).contains(&self.rotated) {
            let expected = format!("2 to head_dim {head_dim}");
            return Err(field_error("the rotated width", &self.rotated, expected));
        }
        self.scaling.check(self.rotated / 2)
    }

    /// Returns the rotation angle per position of each pair of a head's elements, in radians.
    ///
    /// Frequencies are rounded to single precision, as when these models were trained.
    #[expect(clippy::cast_possible_truncation, reason = "rounding is intended")]
    pub(super) fn frequencies(&self, context: usize) -> Vec<f32> {
        let pairs = 0..self.rotated / 2;
        let exponent = |pair: usize| -2. * pair as f64 / self.rotated as f64;
        let plain: Vec<f64> = pairs.map(|pair| self.theta.powf(exponent(pair))).collect();
        let scaled = self.scaling.scale(&plain, self.theta, context);
        scaled.into_iter().map(|frequency| frequency as f32).collect()
    }

    /// Returns the cosines and sines [positions, rotated / 2] of all positions of some spans.
    #[expect(clippy::cast_possible_truncation, reason = "rounding is intended")]
    pub(super) fn tables(
        &self,
        spans: &[Span],
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let factor = self.scaling.attention_factor() as f32;
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for span in spans {
            let frequencies = self.frequencies(span.context);
            for position in span.positions.clone() {
                for frequency in &frequencies {
                    let angle = f64::from(position as f32 * frequency);
                    cos.push(angle.cos() as f32 * factor);
                    sin.push(angle.sin() as f32 * factor);
                }
            }
        }
        let table =
            |items| Tensor::from_vec(items, ((), self.rotated / 2), device)?.to_dtype(dtype);
        Ok((table(cos)?, table(sin)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rotated: usize, theta: f64, scaling: RopeScaling, expected: &[f32]) {
        let rope = RopeConfig { theta, scaling, rotated, pairs: RopePairs::Halves };
        let found = rope.frequencies(128);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            // transformers computes frequencies in single precision.
            assert!((found / expected - 1.).abs() < 4e-7, "{found} for {expected}");
        }
    }

    #[test]
    fn frequencies_match_transformers() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.,
            low_freq_factor: 1.,
            high_freq_factor: 4.,
            original_max_position_embeddings: 64,
        };
        let scaled =
            [1.0, 0.018_723_19, 0.001_574_901, 0.000_176_776_68, 1.984_250_8e-5, 2.227_247_5e-6];
        check(12, 5e5, scaling, &scaled);
        let default = [1.0, 0.031_622_78, 0.001, 3.162_277_4e-5];
        check(8, 1e6, RopeScaling::Default, &default);
        let halved = default.map(|frequency: f32| frequency / 2.);
        check(8, 1e6, RopeScaling::Linear { factor: 2. }, &halved);
    }
}
