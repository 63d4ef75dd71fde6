//! Reports of padding.

use std::fmt;

use crate::{
    batch::{Batch, Sequence},
    limits::Admission,
};

/// Counts of batches, sequences, and real and padded tokens.
///
/// [`Batches::report`](crate::Batches::report) also counts the sequences that are in no batch; a
/// report collected from batches alone cannot.
///
/// # Determinism
///
/// The counts do not depend on the order of the batches.
///
/// # Examples
///
/// ```
/// use dyn_batch::{BatchConfig, DynamicBatchSampler, PaddingReport};
///
/// let sampler =
///     DynamicBatchSampler::new([3_u32, 6, 4], BatchConfig::default().with_max_batch_size(2))?;
/// let batches = sampler.iter().collect::<Result<Vec<_>, _>>()?;
/// let report = PaddingReport::from_iter(&batches);
/// assert_eq!(
///     report.to_string(),
///     "3 sequences in 2 batches, efficiency 0.8125: 13 of 16 tokens are real, at most 12 per batch",
/// );
/// # Ok::<(), dyn_batch::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize))]
#[non_exhaustive]
pub struct PaddingReport {
    /// Number of batches.
    pub batches: u64,
    /// Number of sequences in these batches.
    pub sequences: u64,
    /// Tokens without padding in all batches. Each batch fits into 64 bits, but their sum may not.
    pub real_tokens: u128,
    /// Tokens with padding in all batches.
    pub padded_tokens: u128,
    /// Tokens with padding in the largest batch, which determines the memory.
    pub max_padded_tokens: u64,
    /// Sequences skipped because they are too long.
    pub skipped: u64,
    /// Sequences truncated because they are too long.
    pub truncated: u64,
    /// Sequences dropped because they cannot fill the batch size multiple.
    pub dropped: u64,
}

impl PaddingReport {
    /// Counts a batch.
    #[doc(hidden)]
    pub fn add(&mut self, batch: &Batch) {
        let padded_tokens = batch.padded_tokens();
        self.batches += 1;
        self.sequences += batch.len() as u64;
        self.real_tokens += u128::from(batch.real_tokens);
        self.padded_tokens += u128::from(padded_tokens);
        self.max_padded_tokens = self.max_padded_tokens.max(padded_tokens);
    }

    /// Counts an admission and returns the admitted sequence, if any.
    pub(crate) fn count(&mut self, admission: Admission) -> Option<Sequence> {
        match admission {
            Admission::Whole(sequence) => Some(sequence),
            Admission::Truncated(sequence) => {
                self.truncated += 1;
                Some(sequence)
            }
            Admission::Skipped => {
                self.skipped += 1;
                None
            }
        }
    }

    /// Returns only the counts of skipped, truncated and dropped sequences.
    pub(crate) fn drop_counts(&self) -> Self {
        let &Self { skipped, truncated, dropped, .. } = self;
        Self { skipped, truncated, dropped, ..Self::default() }
    }

    /// Returns the fraction of real tokens; 1.0 if there are no tokens.
    ///
    /// Compare it only for similar numbers of batches: batches of one sequence have no padding, but
    /// training on them is slow.
    pub fn efficiency(&self) -> f64 {
        if self.padded_tokens == 0 {
            1.0
        } else {
            self.real_tokens as f64 / self.padded_tokens as f64
        }
    }
}

impl<'a> Extend<&'a Batch> for PaddingReport {
    fn extend<T: IntoIterator<Item = &'a Batch>>(&mut self, batches: T) {
        for batch in batches {
            self.add(batch);
        }
    }
}

impl<'a> FromIterator<&'a Batch> for PaddingReport {
    fn from_iter<T: IntoIterator<Item = &'a Batch>>(batches: T) -> Self {
        let mut report = Self::default();
        report.extend(batches);
        report
    }
}

impl fmt::Display for PaddingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batches, sequences, real_tokens, padded_tokens, max_padded_tokens, .. } = self;
        write!(
            f,
            "{sequences} sequences in {batches} batches, efficiency {:.4}: ",
            self.efficiency()
        )?;
        write!(
            f,
            "{real_tokens} of {padded_tokens} tokens are real, at most {max_padded_tokens} per batch"
        )?;
        for (count, verb) in
            [(self.skipped, "skipped"), (self.truncated, "truncated"), (self.dropped, "dropped")]
        {
            if count > 0 {
                write!(f, ", {count} {verb}")?;
            }
        }
        Ok(())
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for PaddingReport {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;

        let mut fields = serializer.serialize_struct("PaddingReport", 9)?;
        fields.serialize_field("efficiency", &self.efficiency())?;
        fields.serialize_field("batches", &self.batches)?;
        fields.serialize_field("sequences", &self.sequences)?;
        fields.serialize_field("max_padded_tokens", &self.max_padded_tokens)?;
        fields.serialize_field("real_tokens", &self.real_tokens)?;
        fields.serialize_field("padded_tokens", &self.padded_tokens)?;
        fields.serialize_field("skipped", &self.skipped)?;
        fields.serialize_field("truncated", &self.truncated)?;
        fields.serialize_field("dropped", &self.dropped)?;
        fields.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn efficiency_without_tokens_is_one() {
        assert!((PaddingReport::default().efficiency() - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    fn totals_do_not_overflow() {
        let batch =
            Batch { indices: vec![0], rows: 1, padded_length: u64::MAX, real_tokens: u64::MAX };
        let report = PaddingReport::from_iter([&batch, &batch]);
        assert_eq!(
            (report.padded_tokens, report.max_padded_tokens),
            (2 * u128::from(u64::MAX), u64::MAX)
        );
    }

    #[test]
    fn display_counts_dropped_sequences() {
        let report = PaddingReport { skipped: 2, dropped: 1, ..PaddingReport::default() };
        assert!(
            report.to_string().ends_with("at most 0 per batch, 2 skipped, 1 dropped"),
            "{report}"
        );
    }

    #[cfg(feature = "serde")]
    #[test]
    fn json_form_is_pinned() {
        let batch = Batch { indices: vec![4, 2], rows: 2, padded_length: 4, real_tokens: 6 };
        let report = PaddingReport::from_iter([&batch]);
        let json = concat!(
            r#"{"efficiency":0.75,"batches":1,"sequences":2,"max_padded_tokens":8,"real_tokens":6,"padded_tokens":8,"#,
            r#""skipped":0,"truncated":0,"dropped":0}"#
        );
        assert_eq!(serde_json::to_string(&report).unwrap(), json);
        assert_eq!(serde_json::from_str::<PaddingReport>(json).unwrap(), report);
    }
}
