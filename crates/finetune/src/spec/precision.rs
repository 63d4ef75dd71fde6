//! The type in which a model computes.

use candle_core::DType;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The types in which a model may compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Precision {
    /// Single precision
    #[default]
    F32,
    /// Half precision with the range of f32: half the memory of what is gathered and computed
    Bf16,
}

impl Precision {
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }

    /// Of a number.
    pub(crate) fn bytes(self) -> u128 {
        self.dtype().size_in_bytes() as u128
    }
}
