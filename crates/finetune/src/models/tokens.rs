//! What a model reads.

use candle_core::Tensor;

/// Token ids: a sequence in each row, or several in one.
#[derive(Clone, Debug)]
pub struct Tokens {
    pub(super) ids: Tensor,
    pub(super) packing: Option<Packing>,
}

/// How sequences lie in a row.
#[derive(Clone, Debug)]
pub(super) struct Packing {
    pub(super) segment_ids: Tensor,
    pub(super) position_ids: Tensor,
}

impl Tokens {
    /// A sequence in each row of `ids` [rows, length], `u32`, with its padding behind it: no token
    /// sees what comes after it, so padding needs no mask.
    ///
    /// Those of `dyn_batch::Collator::pad`, for example.
    pub fn rows(ids: Tensor) -> Self {
        Self { ids, packing: None }
    }

    /// Several sequences in each row: `ids`, `segment_ids` and `position_ids` [rows, length], `u32`.
    /// A token sees those before it in its row that have its segment id.
    ///
    /// Those of `dyn_batch::Collator::pack`, for example, one below the other.
    pub fn packed(ids: Tensor, segment_ids: Tensor, position_ids: Tensor) -> Self {
        Self { ids, packing: Some(Packing { segment_ids, position_ids }) }
    }
}
