//! Errors of adapters.

use std::path::PathBuf;

use candle_core::DType;
use core_types::human::Printable;
use dist_checkpoint::support::listed::Listed;

/// An invalid set of adapters for a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// The list of target layers is empty.
    #[error("the adapters have no target layers")]
    NoTargets,
    /// Some targets are not linear layers of the model.
    #[error("no linear layer of the model is named {}", Listed(targets))]
    Unmatched {
        /// All targets without a match.
        targets: Vec<String>,
    },
    /// The weight of a target is not a matrix.
    #[error("{} has the shape {shape:?}, adapters are for matrices", Printable(name))]
    NoMatrix {
        /// The weight.
        name: String,
        /// The shape.
        shape: Vec<usize>,
    },
    /// The weight of a target has half precision. Its sum with an adapter would be rounded to half
    /// precision too.
    #[error(
        "{} is of {}, in which the effect of an adapter may vanish: use Lora::linear or a 32-bit \
         type", Printable(name), dtype.as_str()
    )]
    HalfPrecision {
        /// The layer.
        name: String,
        /// The dtype of the layer's weight.
        dtype: DType,
    },
    /// A layer has an adapter, but the adapters to save do not target the layer.
    #[error("{} has an adapter, and no target names it", Printable(layer))]
    NotTargeted {
        /// The layer.
        layer: String,
    },
    /// The LoRA rank of a matrix differs from the LoRA rank of the adapters to save.
    #[error(
        "{} has the shape {shape:?}, which does not fit adapters of LoRA rank {rank}",
        Printable(name)
    )]
    RankMismatch {
        /// The matrix.
        name: String,
        /// The shape.
        shape: Vec<u64>,
        /// The LoRA rank of the adapters to save.
        rank: usize,
    },
    /// The model has no adapters to save.
    #[error("none of the {parameters} parameters belongs to an adapter")]
    NoAdapters {
        /// Number of parameters of the model.
        parameters: usize,
    },
    /// The configuration of saved adapters defines another function than `B · A · alpha / rank`.
    #[error("{}: {} is {}, {expected} was expected", Printable(path.display()), Printable(field), Printable(found))]
    Config {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// The value of the field, in JSON.
        found: String,
        /// The supported values.
        expected: &'static str,
    },
}

impl From<LoraError> for candle_core::Error {
    /// Wraps the error for constructors of models, which return candle's errors.
    fn from(error: LoraError) -> Self {
        Self::wrap(error)
    }
}
