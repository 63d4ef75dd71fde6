//! Rotary positions: frequencies, and tables of cosines and sines.

use candle_core::{DType, Device, Tensor};

use crate::models::config::LlamaConfig;

/// Returns the rotation angle per position of each pair of a head's elements, in radians.
///
/// Frequencies are rounded to single precision, as when these models were trained.
#[expect(clippy::cast_possible_truncation, reason = "rounding is intended")]
pub(super) fn frequencies(config: &LlamaConfig) -> Vec<f32> {
    let mut frequencies = Vec::with_capacity(config.head_dim / 2);
    for pair in 0..config.head_dim / 2 {
        let exponent = -2. * pair as f64 / config.head_dim as f64;
        let frequency = config.rope_scaling.scale(config.rope_theta.powf(exponent));
        frequencies.push(frequency as f32);
    }
    frequencies
}

/// Returns the cosines and sines of positions, [positions, head size / 2] each.
#[expect(clippy::cast_possible_truncation, reason = "rounding is intended")]
pub(super) fn tables(
    config: &LlamaConfig,
    positions: impl IntoIterator<Item = usize>,
    dtype: DType,
    device: &Device,
) -> candle_core::Result<(Tensor, Tensor)> {
    let frequencies = frequencies(config);
    let angles = positions.into_iter().flat_map(|position| {
        frequencies.iter().map(move |frequency| f64::from(position as f32 * frequency))
    });
    let (cos, sin): (Vec<f32>, Vec<f32>) =
        angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip();
    let table = |items| Tensor::from_vec(items, ((), frequencies.len()), device)?.to_dtype(dtype);
    Ok((table(cos)?, table(sin)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::scaling::RopeScaling;

    fn frequencies_for(head_dim: usize, rope_theta: f64, rope_scaling: RopeScaling) -> Vec<f32> {
        let json = r#"{
            "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 48,
            "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-5
        }"#;
        let config = LlamaConfig::from_json(json).unwrap();
        frequencies(&LlamaConfig { head_dim, rope_theta, rope_scaling, ..config })
    }

    fn check(found: &[f32], expected: &[f32]) {
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
        check(
            &frequencies_for(12, 5e5, scaling),
            &[1.0, 0.018_723_19, 0.001_574_901, 0.000_176_776_68, 1.984_250_8e-5, 2.227_247_5e-6],
        );
        let default = [1.0, 0.031_622_78, 0.001, 3.162_277_4e-5];
        check(&frequencies_for(8, 1e6, RopeScaling::Default), &default);
        let halved = default.map(|frequency: f32| frequency / 2.);
        check(&frequencies_for(8, 1e6, RopeScaling::Linear { factor: 2. }), &halved);
    }
}
