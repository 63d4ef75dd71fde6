//! The data type in which a model computes.

use candle_core::DType;
use serde::{Deserialize, Serialize};

/// The data type in which a model computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Precision {
    /// Single precision
    #[default]
    F32,
    /// Half precision with the range of f32: half the memory for gathered parameters and
    /// activations
    Bf16,
}

impl Precision {
    /// Returns candle's data type.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }

    /// Returns the bytes of a number.
    pub(crate) fn bytes(self) -> u128 {
        self.dtype().size_in_bytes() as u128
    }
}
