//! Sequences and batches.

use crate::error::{Error, Result};

/// The index and length of a sequence; the batcher never reads its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Sequence {
    /// Position in the data set.
    pub index: u64,
    /// Number of tokens, frames or time steps.
    pub length: u64,
}

/// The sequences of one step and the shape of their tensor: `[rows, padded_length]`.
///
/// Each sequence is a row, except in a packed batch, which has one row with all of them.
///
/// # Examples
///
/// ```
/// use dyn_batch::{BatchConfig, DynamicBatchSampler};
///
/// let sampler =
///     DynamicBatchSampler::new([3_u32, 5, 4], BatchConfig::default().with_max_batch_size(8))?;
/// let batches = sampler.iter().collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(batches[0].indices, [0, 1, 2]);
/// assert_eq!((batches[0].len(), batches[0].padded_length), (3, 5));
/// assert_eq!((batches[0].padded_tokens(), batches[0].real_tokens), (15, 12));
/// # Ok::<(), dyn_batch::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "UncheckedBatch"))]
#[non_exhaustive]
pub struct Batch {
    /// Indices of the sequences, row by row.
    pub indices: Vec<u64>,
    /// Number of rows: the number of sequences, or 1 for a packed batch.
    pub rows: u64,
    /// Length of a row: at least the longest sequence.
    pub padded_length: u64,
    /// Sum of the lengths, that is, the tokens without padding.
    pub real_tokens: u64,
}

impl Batch {
    /// Creates a batch with one row per sequence, as long as the longest, for programs that group
    /// sequences themselves.
    ///
    /// `length_of` returns the length of a sequence. If samples have no lengths, return 1: a sample
    /// counts as one token. To pad further, set [`padded_length`](Self::padded_length) afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidTensor`] if rows × padded length exceeds 64 bits.
    ///
    /// # Examples
    ///
    /// ```
    /// use dyn_batch::Batch;
    ///
    /// let lengths = [3_u64, 5, 4];
    /// let batch = Batch::from_indices([2, 0], |index| lengths[index as usize])?;
    /// assert_eq!((batch.rows, batch.padded_length, batch.real_tokens), (2, 4, 7));
    ///
    /// let images = Batch::from_indices(64..96, |_| 1)?;
    /// assert_eq!((images.len(), images.padded_tokens()), (32, 32));
    /// # Ok::<(), dyn_batch::Error>(())
    /// ```
    pub fn from_indices(
        indices: impl IntoIterator<Item = u64>,
        length_of: impl FnMut(u64) -> u64,
    ) -> Result<Self> {
        let indices: Vec<u64> = indices.into_iter().collect();
        let lengths: Vec<u64> = indices.iter().copied().map(length_of).collect();
        let rows = indices.len() as u64;
        let padded_length = lengths.iter().copied().max().unwrap_or(0);
        if rows.checked_mul(padded_length).is_none() {
            return Err(Error::tensor_too_large(rows, padded_length, 1));
        }
        // The sum is at most the product.
        Ok(Self { indices, rows, padded_length, real_tokens: lengths.iter().sum() })
    }

    /// Returns the number of sequences.
    #[doc(alias = "batch_size")]
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Returns true if the batch has no sequences. Samplers never return such a batch.
    #[doc(hidden)]
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// Returns the number of elements of the padded tensor: rows × padded length.
    ///
    /// Batches of a sampler never overflow; a modified batch saturates.
    pub fn padded_tokens(&self) -> u64 {
        self.rows.saturating_mul(self.padded_length)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Batch {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;

        let mut fields = serializer.serialize_struct("Batch", 4)?;
        fields.serialize_field("indices", &self.indices)?;
        fields.serialize_field("padded_length", &self.padded_length)?;
        fields.serialize_field("padded_tokens", &self.padded_tokens())?;
        fields.serialize_field("real_tokens", &self.real_tokens)?;
        fields.end()
    }
}

/// An unvalidated [`Batch`].
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct UncheckedBatch {
    indices: Vec<u64>,
    padded_length: u64,
    padded_tokens: u64,
    real_tokens: u64,
}

#[cfg(feature = "serde")]
impl TryFrom<UncheckedBatch> for Batch {
    type Error = String;

    fn try_from(batch: UncheckedBatch) -> Result<Self, String> {
        let UncheckedBatch { indices, padded_length, padded_tokens, real_tokens } = batch;
        let size = indices.len() as u64;
        // A padded batch has one row per sequence, a packed batch has one row.
        for rows in [size, 1] {
            let is_row_count = rows.checked_mul(padded_length) == Some(padded_tokens);
            if is_row_count && real_tokens <= padded_tokens {
                return Ok(Self { indices, rows, padded_length, real_tokens });
            }
        }
        let shape = format!("{size} sequences padded to {padded_length}");
        Err(format!("{shape} cannot make {padded_tokens} tokens, {real_tokens} of them real"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_beyond_64_bits_are_rejected() {
        let batch = |n| Batch::from_indices(0..n, |_| u64::MAX);
        assert_eq!(batch(1).unwrap().real_tokens, u64::MAX);
        assert_eq!(batch(2).unwrap_err(), Error::tensor_too_large(2, u64::MAX, 1));
        assert_eq!(batch(0).unwrap().padded_tokens(), 0);
    }

    #[cfg(feature = "serde")]
    #[test]
    fn json_form_is_pinned() {
        let json = r#"{"indices":[4,2],"padded_length":7,"padded_tokens":14,"real_tokens":9}"#;
        let batch: Batch = serde_json::from_str(json).unwrap();
        assert_eq!(batch, Batch { indices: vec![4, 2], rows: 2, padded_length: 7, real_tokens: 9 });
        assert_eq!(serde_json::to_string(&batch).unwrap(), json);
    }

    #[cfg(feature = "serde")]
    #[test]
    fn contradictory_batches_are_rejected() {
        for json in [
            r#"{"indices":[4,2],"padded_length":7,"padded_tokens":13,"real_tokens":9}"#,
            r#"{"indices":[4,2],"padded_length":7,"padded_tokens":14,"real_tokens":15}"#,
            r#"{"indices":[4,2],"padded_length":18446744073709551615,"padded_tokens":14,"real_tokens":9}"#,
        ] {
            let error = serde_json::from_str::<Batch>(json).unwrap_err();
            assert!(error.to_string().contains("cannot make"), "{error}");
        }
    }
}
