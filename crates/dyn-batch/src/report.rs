//! How much of the batches is padding.

use std::fmt;

use crate::{
    batch::{Batch, Sequence},
    limits::Admission,
};

/// What batches cost: how many there are, and how many of their tokens are real.
///
/// [`Batches::report`](crate::Batches::report) keeps one while it goes, with the sequences that
/// made it into no batch; a report collected from batches alone cannot know these.
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
    /// The number of batches.
    pub batches: u64,
    /// The number of sequences in them.
    pub sequences: u64,
    /// The tokens that are no padding, of all batches; 128 bits, because only each batch by itself
    /// fits 64.
    pub real_tokens: u128,
    /// The tokens with the padding, of all batches.
    pub padded_tokens: u128,
    /// The tokens with the padding of the largest batch: what the memory must hold.
    pub max_padded_tokens: u64,
    /// The sequences left out because they are too long.
    pub skipped: u64,
    /// The sequences cut because they are too long.
    pub truncated: u64,
    /// The sequences left out because they could not fill up the multiple.
    pub dropped: u64,
}

impl PaddingReport {
    /// Counts one more batch.
    pub fn add(&mut self, batch: &Batch) {
        let padded_tokens = batch.padded_tokens();
        self.batches += 1;
        self.sequences += batch.len() as u64;
        self.real_tokens += u128::from(batch.real_tokens);
        self.padded_tokens += u128::from(padded_tokens);
        self.max_padded_tokens = self.max_padded_tokens.max(padded_tokens);
    }

    /// Counts what the limits made of a sequence, and returns it as it counts in a batch.
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

    /// The same report before any batch: what was skipped, truncated and dropped.
    pub(crate) fn drop_counts(&self) -> Self {
        let &Self { skipped, truncated, dropped, .. } = self;
        Self { skipped, truncated, dropped, ..Self::default() }
    }

    /// The share of the tokens that is real: 1.0 without padding, and for no tokens at all.
    ///
    /// Compare it at similar numbers of batches only: batches of one sequence have no padding, and
    /// no speed.
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
        batches.into_iter().for_each(|batch| self.add(batch));
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
        for (count, fate) in
            [(self.skipped, "skipped"), (self.truncated, "truncated"), (self.dropped, "dropped")]
        {
            if count > 0 {
                write!(f, ", {count} {fate}")?;
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
    fn no_tokens_are_no_waste() {
        assert!((PaddingReport::default().efficiency() - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    fn totals_of_the_largest_batches_do_not_overflow() {
        let batch =
            Batch { indices: vec![0], rows: 1, padded_length: u64::MAX, real_tokens: u64::MAX };
        let report = PaddingReport::from_iter([&batch, &batch]);
        assert_eq!(
            (report.padded_tokens, report.max_padded_tokens),
            (2 * u128::from(u64::MAX), u64::MAX)
        );
    }

    #[test]
    fn sequences_in_no_batch_are_named() {
        let report = PaddingReport { skipped: 2, dropped: 1, ..PaddingReport::default() };
        assert!(
            report.to_string().ends_with("at most 0 per batch, 2 skipped, 1 dropped"),
            "{report}"
        );
    }

    #[cfg(feature = "serde")]
    #[test]
    fn the_json_form_is_pinned() {
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
