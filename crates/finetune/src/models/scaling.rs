//! Scaling of rotary frequencies.

use std::f64::consts::PI;

use crate::models::error::{ModelError, field_error};

/// The scaling of rotary frequencies, `rope_scaling` or `rope_parameters` of `config.json`. It extends a
/// model to longer sequences than in its first training.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No scaling.
    #[default]
    Default,
    /// All frequencies are divided by a factor (Chen et al., arXiv 2306.15595).
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Low frequencies are divided by a factor, high frequencies are kept, and frequencies in
    /// between are interpolated, as in Llama 3.1.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Number of turns over the original length below which a frequency is low.
        low_freq_factor: f64,
        /// Number of turns over the original length above which a frequency is high.
        high_freq_factor: f64,
        /// Sequence length of the first training, in tokens.
        original_max_position_embeddings: usize,
    },
    /// Like `Llama3`, interpolated between pairs instead of frequencies (Peng et al., "YaRN", arXiv
    /// 2309.00071).
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Sequence length of the first training, in tokens.
        original_max_position_embeddings: usize,
        /// Number of turns over the original length above which a frequency is high.
        beta_fast: f64,
        /// Number of turns over the original length below which a frequency is low.
        beta_slow: f64,
        /// Whether the first and the last interpolated pair are rounded outwards.
        truncate: bool,
        /// The factor of cosines and sines.
        attention_factor: f64,
    },
    /// Each frequency has its own divisor, one for short and one for long texts (Ding et al.,
    /// "LongRoPE", arXiv 2402.13753).
    LongRope {
        /// The longest text with the divisors of short texts, in tokens.
        original_max_position_embeddings: usize,
        /// Divisors in short texts.
        short_factor: Vec<f64>,
        /// Divisors in long texts.
        long_factor: Vec<f64>,
        /// The factor of cosines and sines.
        attention_factor: f64,
    },
}

impl RopeScaling {
    /// Checks the ranges of the fields, for heads with `n_pairs` pairs that turn.
    pub(super) fn check(&self, n_pairs: usize) -> Result<(), ModelError> {
        match self {
            Self::Default => Ok(()),
            Self::Linear { factor } => check_factor(*factor),
            &Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                check_range(["low_freq_factor", "rope_scaling.high_freq_factor"], low, high)?;
                check_original(original)?;
                check_factor(factor)
            }
            &Self::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast,
                beta_slow,
                attention_factor,
                ..
            } => {
                check_range(["beta_slow", "rope_scaling.beta_fast"], beta_slow, beta_fast)?;
                check_original(original)?;
                check_positive("rope_scaling.attention_factor", attention_factor)?;
                check_factor(factor)
            }
            Self::LongRope {
                original_max_position_embeddings: original,
                short_factor,
                long_factor,
                attention_factor,
            } => {
                check_original(*original)?;
                check_divisors("rope_scaling.short_factor", short_factor, n_pairs)?;
                check_divisors("rope_scaling.long_factor", long_factor, n_pairs)?;
                check_positive("rope_scaling.attention_factor", *attention_factor)
            }
        }
    }

    /// Returns the factor of cosines and sines.
    pub(super) fn attention_factor(&self) -> f64 {
        match self {
            Self::Yarn { attention_factor, .. } | Self::LongRope { attention_factor, .. } => {
                *attention_factor
            }
            Self::Default | Self::Linear { .. } | Self::Llama3 { .. } => 1.,
        }
    }

    /// Scales the frequencies of a text of up to `context` tokens.
    pub(super) fn scale(&self, frequencies: &[f64], theta: f64, context: usize) -> Vec<f64> {
        let each = |scale: &dyn Fn(usize, f64) -> f64| {
            frequencies
                .iter()
                .enumerate()
                .map(|(pair, &frequency)| scale(pair, frequency))
                .collect()
        };
        match self {
            Self::Default => frequencies.to_vec(),
            Self::Linear { factor } => each(&|_, frequency| frequency / factor),
            &Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => each(&|_, frequency| {
                let turns = original as f64 * frequency / (2. * PI);
                // 0 for low frequencies, 1 for high frequencies.
                let highness = ((turns - low) / (high - low)).clamp(0., 1.);
                frequency / factor * (1. - highness) + frequency * highness
            }),
            &Self::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                let (width, betas) = (2 * frequencies.len(), [beta_fast, beta_slow]);
                let (first, last) = interpolated_pairs(width, theta, original, betas, truncate);
                each(&|pair, frequency| {
                    // 0 for high frequencies, 1 for low frequencies.
                    let lowness = ((pair as f64 - first) / (last - first)).clamp(0., 1.);
                    frequency / factor * lowness + frequency * (1. - lowness)
                })
            }
            Self::LongRope {
                original_max_position_embeddings: original,
                short_factor,
                long_factor,
                ..
            } => {
                let divisors = if context > *original { long_factor } else { short_factor };
                each(&|pair, frequency| frequency / divisors[pair])
            }
        }
    }

    /// Returns true if a text of `length` tokens is short, and long with one more.
    pub(super) fn becomes_long(&self, length: usize) -> bool {
        matches!(self, Self::LongRope { original_max_position_embeddings, .. }
            if length == *original_max_position_embeddings)
    }
}

/// Returns the pairs between which YaRN interpolates, in heads of `width` elements that turn. `betas` are
/// the turns over the `original` length above which a frequency is high, and below which it is low.
fn interpolated_pairs(
    width: usize,
    theta: f64,
    original: usize,
    betas: [f64; 2],
    truncate: bool,
) -> (f64, f64) {
    let width = width as f64;
    // The pair that makes this number of turns.
    let pair = |turns: f64| width * (original as f64 / (2. * PI * turns)).ln() / (2. * theta.ln());
    let [mut first, mut last] = betas.map(pair);
    if truncate {
        (first, last) = (first.floor(), last.ceil());
    }
    (first, last) = (first.max(0.), last.min(width - 1.));
    // As in transformers, to avoid a division by 0.
    if first.total_cmp(&last).is_eq() { (first, last + 0.001) } else { (first, last) }
}

fn check_factor(factor: f64) -> Result<(), ModelError> {
    if factor >= 1. && factor.is_finite() {
        return Ok(());
    }
    Err(field_error("rope_scaling.factor", &factor, "a number of at least 1".into()))
}

fn check_positive(field: &'static str, value: f64) -> Result<(), ModelError> {
    if value > 0. && value.is_finite() {
        return Ok(());
    }
    Err(field_error(field, &value, "a positive number".into()))
}

fn check_range(
    [low_name, high_field]: [&'static str; 2],
    low: f64,
    high: f64,
) -> Result<(), ModelError> {
    if low > 0. && high > low && high.is_finite() {
        return Ok(());
    }
    let expected = format!("a number above {low_name} {low}, which is positive");
    Err(field_error(high_field, &high, expected))
}

fn check_original(original: usize) -> Result<(), ModelError> {
    if original > 0 {
        return Ok(());
    }
    let field = "rope_scaling.original_max_position_embeddings";
    Err(field_error(field, &original, "at least 1".into()))
}

fn check_divisors(field: &'static str, divisors: &[f64], n_pairs: usize) -> Result<(), ModelError> {
    if divisors.len() != n_pairs {
        let found = format!("{} numbers", divisors.len());
        return Err(field_error(field, &found, format!("{n_pairs}, one for each pair")));
    }
    divisors.iter().try_for_each(|&divisor| check_positive(field, divisor))
}
