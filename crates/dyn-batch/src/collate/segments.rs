//! Where the sequences of a packed row lie.

/// The sequences of one packed row, one behind the other, padding at the end.
///
/// Attention must not look from one into the next, and positions begin anew in each: kernels ask
/// for the limits of the sequences (`cu_seqlens`, as `flash_attn_varlen_func` of `FlashAttention`
/// calls them), models for position ids, masks for segment ids.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Segments {
    cu_seqlens: Vec<u32>,
}

impl Segments {
    /// Sequences of these lengths, in a row; `None` if they are longer than `u32::MAX` tokens
    /// together.
    pub(crate) fn new(lengths: impl IntoIterator<Item = u64>) -> Option<Self> {
        let mut end = 0_u32;
        let mut cu_seqlens = vec![end];
        for length in lengths {
            end = end.checked_add(u32::try_from(length).ok()?)?;
            cu_seqlens.push(end);
        }
        Some(Self { cu_seqlens })
    }

    /// The tokens before each sequence, and those of all.
    pub(crate) fn cu_seqlens(&self) -> &[u32] {
        &self.cu_seqlens
    }

    /// For each of `row_len` tokens its place in its sequence, 0 for padding.
    pub(crate) fn position_ids(&self, row_len: usize) -> Vec<u32> {
        let mut ids: Vec<u32> =
            self.cu_seqlens.windows(2).flat_map(|ends| 0..ends[1] - ends[0]).collect();
        ids.resize(row_len, 0);
        ids
    }

    /// For each of `row_len` tokens the number of its sequence, from 1, and 0 for padding.
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
    fn ids_begin_anew_in_each_sequence() {
        let row = Segments::new([3, 2]).unwrap();
        assert_eq!(row.cu_seqlens(), [0, 3, 5]);
        assert_eq!(row.position_ids(7), [0, 1, 2, 0, 1, 0, 0]);
        assert_eq!(row.segment_ids(7), [1, 1, 1, 2, 2, 0, 0]);
    }
}
