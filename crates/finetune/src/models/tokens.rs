//! Input of a model.

use candle_core::Tensor;

/// Token ids in rows. A row has one sequence, or several packed sequences.
#[derive(Clone, Debug)]
pub struct Tokens {
    pub(super) ids: Tensor,
    pub(super) packing: Option<Packing>,
}

/// The layout of sequences in a row.
#[derive(Clone, Debug)]
pub(super) struct Packing {
    pub(super) segment_ids: Tensor,
    pub(super) position_ids: Tensor,
}

impl Tokens {
    /// Makes the input for one sequence in each row of `ids` [rows, length], `u32`, padded on the right.
    /// Tokens do not attend to later tokens, so padding needs no mask. `dyn_batch::Collator::pad` makes
    /// such rows.
    pub fn rows(ids: Tensor) -> Self {
        Self { ids, packing: None }
    }

    /// Makes the input for several sequences in each row: `ids`, `segment_ids` and `position_ids`
    /// [rows, length], `u32`. A token attends to earlier tokens of its segment.
    /// `dyn_batch::Collator::pack` makes such rows.
    pub fn packed(ids: Tensor, segment_ids: Tensor, position_ids: Tensor) -> Self {
        Self { ids, packing: Some(Packing { segment_ids, position_ids }) }
    }
}
