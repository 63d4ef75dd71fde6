//! A sequence as the batcher sees it, and a batch of them.

/// All that the batcher knows about a sequence; it never sees the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Sequence {
    /// Its position in the data set.
    pub index: u64,
    /// The number of its tokens, frames or time steps.
    pub length: u64,
}

/// The sequences of one step, and the shape of the tensor that holds them: `[rows, padded_length]`.
///
/// Each sequence is a row, except in a packed batch, whose one row holds all of them.
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
#[cfg_attr(feature = "serde", serde(try_from = "Unchecked"))]
#[non_exhaustive]
pub struct Batch {
    /// The sequences, row by row.
    pub indices: Vec<u64>,
    /// The rows of the tensor: the number of sequences, or 1 if they are packed.
    pub rows: u64,
    /// The length of a row: that of the longest sequence, or more if the configuration asks for it.
    pub padded_length: u64,
    /// The sum of the lengths: how many tokens are no padding.
    pub real_tokens: u64,
}

impl Batch {
    /// The number of sequences; the spec's `BatchSize`.
    #[doc(alias = "batch_size")]
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Whether there is no sequence; no sampler makes such a batch.
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// The number of elements of the padded tensor: rows × padded length.
    ///
    /// No batch of a sampler overflows; one that was changed by hand saturates.
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

/// What a [`Batch`] looks like before it is checked.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct Unchecked {
    indices: Vec<u64>,
    padded_length: u64,
    padded_tokens: u64,
    real_tokens: u64,
}

#[cfg(feature = "serde")]
impl TryFrom<Unchecked> for Batch {
    type Error = String;

    fn try_from(batch: Unchecked) -> Result<Self, String> {
        let Unchecked { indices, padded_length, padded_tokens, real_tokens } = batch;
        let size = indices.len() as u64;
        let has_tokens = |rows: &u64| rows.checked_mul(padded_length) == Some(padded_tokens);
        // A row each, or all in one.
        if let Some(rows) =
            [size, 1].into_iter().find(has_tokens).filter(|_| real_tokens <= padded_tokens)
        {
            return Ok(Self { indices, rows, padded_length, real_tokens });
        }
        let shape = format!("{size} sequences padded to {padded_length}");
        Err(format!("{shape} cannot make {padded_tokens} tokens, {real_tokens} of them real"))
    }
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;

    #[test]
    fn the_json_form_is_pinned() {
        let json = r#"{"indices":[4,2],"padded_length":7,"padded_tokens":14,"real_tokens":9}"#;
        let batch: Batch = serde_json::from_str(json).unwrap();
        assert_eq!(batch, Batch { indices: vec![4, 2], rows: 2, padded_length: 7, real_tokens: 9 });
        assert_eq!(serde_json::to_string(&batch).unwrap(), json);
    }

    #[test]
    fn a_batch_that_contradicts_itself_is_refused() {
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
