//! What a batch takes, which no plan knows.

use super::Runtime;
use crate::{
    elem::ElemType,
    error::{Error, Result},
};

/// What a rank's part of a batch takes within and between units.
///
/// # Examples
///
/// ```
/// use fsdp_plan::{
///     ElemType,
///     cost::{Activations, CostModel, Runtime},
/// };
///
/// // Two sequences of 512 tokens per rank, 768 numbers wide.
/// let activations = Activations::of_transformer(1024, 768, ElemType::F32, Runtime::Candle)?;
/// assert_eq!(activations.input_bytes, 1024 * 768 * 4);
/// let model = CostModel::default().with_runtime(Runtime::Candle).with_activations(activations);
/// # let _ = model;
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "whoever knows the model better writes both down")]
pub struct Activations {
    /// The bytes of a unit's inputs, which are kept for the backward pass where the unit is computed
    /// again in it.
    pub input_bytes: u64,
    /// The bytes of everything that the largest unit computes, with the gradients of it that are
    /// there at the same time.
    pub unit_bytes: u64,
}

impl Activations {
    /// An estimate for the blocks of a transformer, from the tokens of a rank's part of a batch and
    /// the width of the values between blocks, of `dtype`.
    ///
    /// A block of PyTorch's keeps 17 numbers for each token and place of the width, attention scores
    /// not counted: 34 bytes in half precision (V. Korthikanti and others, "Reducing Activation
    /// Recomputation in Large Transformer Models", arXiv 2205.05198, equation 2). On candle it is
    /// 56 numbers with the gradients, measured on this project's own transformer.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if the bytes do not fit into 64 bits.
    pub fn of_transformer(
        tokens: u64,
        width: u64,
        dtype: ElemType,
        runtime: Runtime,
    ) -> Result<Self> {
        let numbers = match runtime {
            Runtime::Torch => 17,
            Runtime::Candle => 56,
        };
        let bytes = |numbers: u128| {
            let values = u128::from(tokens).checked_mul(u128::from(width));
            let values = values.and_then(|values| values.checked_mul(numbers));
            let bytes = values.and_then(|values| u64::try_from(dtype.bytes(values)).ok());
            bytes.ok_or(Error::TotalTooLarge { what: "the bytes of activations" })
        };
        Ok(Self { input_bytes: bytes(1)?, unit_bytes: bytes(numbers)? })
    }
}
