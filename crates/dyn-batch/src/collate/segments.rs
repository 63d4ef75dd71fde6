//! Positions of the sequences of a packed row.

/// The sequences of one packed row, contiguous, with padding at the end.
///
/// Attention must stay within a sequence, and positions restart in each. Kernels take the bounds of
/// the sequences (`cu_seqlens` in `flash_attn_varlen_func` of `FlashAttention`), models take
/// position ids, and masks take segment ids.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PackedSegments {
    cu_seqlens: Vec<u32>,
}

impl PackedSegments {
    /// Creates a row of sequences with these lengths, or returns `None` if they exceed `u32::MAX`
    /// tokens.
    pub(crate) fn new(lengths: impl IntoIterator<Item = u64>) -> Option<Self> {
        let mut end = 0_u32;
        let mut cu_seqlens = vec![end];
        for length in lengths {
            end = end.checked_add(u32::try_from(length).ok()?)?;
            cu_seqlens.push(end);
        }
        Some(Self { cu_seqlens })
    }

    /// Returns the number of tokens before each sequence, and the total.
    pub(crate) fn cu_seqlens(&self) -> &[u32] {
        &self.cu_seqlens
    }

    /// Returns the position of each token in its sequence; 0 for padding.
    pub(crate) fn position_ids(&self, row_len: usize) -> Vec<u32> {
        let mut ids: Vec<u32> =
            self.cu_seqlens.windows(2).flat_map(|ends| 0..ends[1] - ends[0]).collect();
        ids.resize(row_len, 0);
        ids
    }

    /// Returns the number of each token's sequence, from 1; 0 for padding.
    pub(crate) fn segment_ids(&self, row_len: usize) -> Vec<u32> {
        let mut ids = Vec::with_capacity(row_len);
        for (id, ends) in (1..).zip(self.cu_seqlens.windows(2)) {
            ids.resize(ends[1] as usize, id);
        }
        ids.resize(row_len, 0);
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_restart_in_each_sequence() {
        let row = PackedSegments::new([3, 2]).unwrap();
        assert_eq!(row.cu_seqlens(), [0, 3, 5]);
        assert_eq!(row.position_ids(7), [0, 1, 2, 0, 1, 0, 0]);
        assert_eq!(row.segment_ids(7), [1, 1, 1, 2, 2, 0, 0]);
    }
}
