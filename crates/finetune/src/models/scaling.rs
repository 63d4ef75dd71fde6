//! Scaling of rotary frequencies.

use std::f64::consts::PI;

use crate::models::error::{ModelError, field_error};

/// The scaling of rotary frequencies, `rope_scaling` or `rope_parameters` of `config.json`. It extends a
/// model to longer sequences than in its first training.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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
}

impl RopeScaling {
    pub(super) fn check(&self) -> Result<(), ModelError> {
        let factor = match *self {
            Self::Default => return Ok(()),
            Self::Linear { factor } => factor,
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                if !(low > 0. && high > low && high.is_finite()) {
                    let expected =
                        format!("a number above low_freq_factor {low}, which is positive");
                    return Err(field_error("rope_scaling.high_freq_factor", &high, expected));
                }
                if original == 0 {
                    let field = "rope_scaling.original_max_position_embeddings";
                    return Err(field_error(field, &original, "at least 1".into()));
                }
                factor
            }
        };
        if factor >= 1. && factor.is_finite() {
            Ok(())
        } else {
            Err(field_error("rope_scaling.factor", &factor, "a number of at least 1".into()))
        }
    }

    /// Scales a frequency.
    pub(super) fn scale(&self, frequency: f64) -> f64 {
        match *self {
            Self::Default => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                let turns = original as f64 * frequency / (2. * PI);
                // 0 for low frequencies, 1 for high frequencies.
                let highness = ((turns - low) / (high - low)).clamp(0., 1.);
                frequency / factor * (1. - highness) + frequency * highness
            }
        }
    }
}
