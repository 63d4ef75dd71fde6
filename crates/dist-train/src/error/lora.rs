//! What can be wrong with the adapters of a model.

use std::path::PathBuf;

use candle_core::DType;
use core_types::human::Printable;
use dist_checkpoint::support::listed::Listed;

/// Why a model cannot have these adapters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// No layer is to have an adapter.
    #[error("no layers are named that adapters are for")]
    NoTargets,
    /// Targets are no linear layers of the model.
    #[error("no linear layer of the model is named {}", Listed(targets))]
    Unmatched {
        /// All that match nothing.
        targets: Vec<String>,
    },
    /// A target has a weight that is no matrix.
    #[error("{} has the shape {shape:?}, adapters are for matrices", Printable(name))]
    NoMatrix {
        /// The weight.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A target has a weight of half precision, which its sum with an adapter would be rounded to.
    #[error(
        "{} is of {}, in which the effect of an adapter may vanish: use Lora::linear, or a type of \
         32 bits", Printable(name), dtype.as_str()
    )]
    Rounded {
        /// The layer.
        name: String,
        /// The type of its weight.
        dtype: DType,
    },
    /// A layer has an adapter that is none of those to be saved.
    #[error("{} has an adapter, and no target names it", Printable(layer))]
    NotTargeted {
        /// The layer.
        layer: String,
    },
    /// A matrix is of adapters of another rank than those to be saved.
    #[error("{} has the shape {shape:?}, which is not of rank {rank}", Printable(name))]
    OtherRank {
        /// The matrix.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The rank of the adapters to be saved.
        rank: usize,
    },
    /// The model has no adapters that could be saved.
    #[error("none of the {parameters} parameters belongs to an adapter")]
    NoAdapters {
        /// How many parameters there are.
        parameters: usize,
    },
    /// The configuration of saved adapters asks for something else than `B · A · alpha / rank`.
    #[error("{}: {} is {}, {expected} was expected", Printable(path.display()), Printable(field), Printable(found))]
    Config {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// What it says, in JSON.
        found: String,
        /// What it may say.
        expected: &'static str,
    },
}

impl From<LoraError> for candle_core::Error {
    /// For the constructors of models, which return candle's errors.
    fn from(error: LoraError) -> Self {
        Self::wrap(error)
    }
}
