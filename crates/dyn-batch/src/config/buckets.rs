//! Buckets of lengths.

use crate::{
    error::{Error, Result},
    lengths::{
        SequenceLengths,
        histogram::{LengthCounter, LengthHistogram, LengthRun},
        measure,
        minima::row_minima,
    },
};

/// The lengths that share a bucket, and so can share a batch.
///
/// # Examples
///
/// Two buckets for these lengths: the optimal boundaries separate the three long sequences.
///
/// ```
/// use dyn_batch::Buckets;
///
/// let lengths = [10_u32, 11, 12, 10, 13, 90, 100, 95];
/// assert_eq!(Buckets::optimal(&lengths, 2)?, Buckets::Boundaries(vec![13, 100]));
/// # Ok::<(), dyn_batch::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Buckets {
    /// Lengths of 0 to width − 1, of width to 2 width − 1, and so on.
    Width(u64),
    /// Lengths up to the first boundary, up to the second, and so on. Boundaries ascend, and the
    /// last one is the longest sequence.
    Boundaries(Vec<u64>),
}

impl Buckets {
    /// A default width for unknown lengths.
    #[doc(hidden)]
    pub const DEFAULT_WIDTH: u64 = 64;

    /// Creates at most `n_buckets` buckets with the least padding if each sequence is padded to its
    /// boundary.
    ///
    /// Use them with [`fixed_shapes`](crate::BatchConfig::fixed_shapes), for compiled functions and
    /// captured graphs that need few shapes.
    ///
    /// # Complexity
    ///
    /// O(n + K · D log D) time for n sequences of D distinct lengths and K buckets, O(K · D)
    /// memory. The algorithm is dynamic programming by bisection: the best last boundary never
    /// moves down as lengths are added (Galil and Park, "Dynamic programming with convexity,
    /// concavity and sparsity", 1992).
    ///
    /// # Errors
    ///
    /// [`Error::Zero`] for zero buckets, or no sequences, [`Error::IndexOutOfRange`] if a counted
    /// sequence has no length, and [`Error::TooMany`] if K · D exceeds 2^27.
    pub fn optimal(lengths: impl SequenceLengths, n_buckets: u64) -> Result<Self> {
        let histogram = build_histogram(lengths, n_buckets)?;
        let n_lengths = histogram.runs().len() as u64;
        let n_entries = n_buckets.min(n_lengths).saturating_mul(n_lengths);
        if n_entries > MAX_ENTRIES {
            let count = n_buckets.saturating_mul(n_lengths);
            let what = "pairs of a bucket and a length";
            return Err(Error::TooMany { count, what, limit: MAX_ENTRIES });
        }
        Ok(Self::Boundaries(optimal_boundaries(histogram.runs(), n_buckets)))
    }

    /// Checks that there are boundaries and that they ascend.
    pub(crate) fn check(&self) -> Result<()> {
        let Self::Boundaries(boundaries) = self else { return Ok(()) };
        if boundaries.is_empty() {
            return Err(Error::Zero { setting: "number of buckets" });
        }
        match boundaries.windows(2).find(|pair| pair[0] >= pair[1]) {
            Some(pair) => {
                let [boundary, next] = [pair[0], pair[1]];
                let reason = "boundaries must ascend";
                Err(Error::config(format!(
                    "bucket boundary {boundary} is followed by {next}, {reason}"
                )))
            }
            None => Ok(()),
        }
    }

    /// Returns the index of the bucket for this length.
    pub(crate) fn index(&self, length: u64) -> u64 {
        match self {
            Self::Width(width) => length / width,
            Self::Boundaries(boundaries) => {
                boundaries.partition_point(|&boundary| boundary < length) as u64
            }
        }
    }

    /// Returns the longest length of a bucket, or `None` if the bucket does not exist or its length
    /// exceeds 64 bits.
    pub(crate) fn longest(&self, bucket: u64) -> Option<u64> {
        match self {
            Self::Width(width) => bucket.checked_mul(*width)?.checked_add(width - 1),
            Self::Boundaries(boundaries) => boundaries.get(usize::try_from(bucket).ok()?).copied(),
        }
    }
}

fn build_histogram(lengths: impl SequenceLengths, n_buckets: u64) -> Result<LengthHistogram> {
    if n_buckets == 0 {
        return Err(Error::Zero { setting: "number of buckets" });
    }
    let mut counter = LengthCounter::default();
    for index in 0..lengths.count() {
        counter.add(measure(&lengths, index)?.length);
    }
    let histogram = counter.finish();
    if histogram.count() == 0 {
        return Err(Error::Zero { setting: "number of sequences" });
    }
    Ok(histogram)
}

/// Limit on the entries of the table of cuts, of 4 bytes each.
const MAX_ENTRIES: u64 = 1 << 27;

/// A number of padded tokens. A few sequences of 64-bit lengths have more than 64 bits can count.
type Tokens = u128;

#[expect(clippy::cast_possible_truncation, reason = "the table of cuts has fewer entries")]
fn optimal_boundaries(runs: &[LengthRun], n_buckets: u64) -> Vec<u64> {
    let n_buckets = n_buckets.min(runs.len() as u64) as usize;
    // n_shorter[end]: the number of sequences of the `end` shortest lengths.
    let mut n_shorter: Vec<Tokens> = vec![0];
    for run in runs {
        n_shorter.push(n_shorter[n_shorter.len() - 1] + Tokens::from(run.count));
    }
    let longest = |end: usize| Tokens::from(runs[end - 1].length);
    // best[end]: the fewest padded tokens of the `end` shortest lengths with the buckets so far,
    // initially one.
    let mut best: Vec<Tokens> = vec![0];
    best.extend((1..n_shorter.len()).map(|end| n_shorter[end] * longest(end)));
    let mut cuts_per_bucket = Vec::new();
    for _ in 1..n_buckets {
        let mut next_best = vec![0; best.len()];
        let mut cuts = vec![0_u32; best.len()];
        row_minima(
            1..best.len(),
            0..best.len(),
            &|end| 0..end,
            // The cost of one more bucket, from `cut` to `end`. The matrix is totally monotone,
            // because a longer sequence adds padding to every other sequence of its bucket.
            &|end, cut| best[cut] + (n_shorter[end] - n_shorter[cut]) * longest(end),
            &mut |end, cut, tokens| {
                next_best[end] = tokens;
                cuts[end] = cut as u32;
            },
        );
        best = next_best;
        cuts_per_bucket.push(cuts);
    }
    let mut ends = vec![runs.len()];
    for cuts in cuts_per_bucket.iter().rev() {
        ends.push(cuts[ends[ends.len() - 1]] as usize);
    }
    // An unneeded bucket is empty: it ends at 0.
    ends.into_iter().rev().filter(|&end| end > 0).map(|end| runs[end - 1].length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padded(lengths: &[u64], boundaries: &[u64]) -> u64 {
        lengths
            .iter()
            .filter_map(|&length| boundaries.iter().find(|&&boundary| length <= boundary))
            .sum()
    }

    /// Computes the fewest padded tokens by trying every set of boundaries.
    fn brute_force(lengths: &[u64], n_buckets: u32) -> u64 {
        let mut distinct = lengths.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let longest = distinct.pop();
        let subsets = (0..1_u32 << distinct.len()).filter(|subset| subset.count_ones() < n_buckets);
        let mut fewest = u64::MAX;
        for subset in subsets {
            let chosen = (0..distinct.len()).filter(|i| subset >> i & 1 == 1);
            let boundaries: Vec<_> = chosen.map(|i| distinct[i]).chain(longest).collect();
            fewest = fewest.min(padded(lengths, &boundaries));
        }
        fewest
    }

    #[test]
    fn optimal_boundaries_pad_least() {
        for seed in 0..200_u64 {
            let draws = (0..=seed % 12).map(|i| core_types::Seed::new(seed).derive(i).as_u64());
            let lengths: Vec<u64> = draws.map(|draw| draw % (10 + seed)).collect();
            for n_buckets in 1..=6 {
                let Buckets::Boundaries(found) =
                    Buckets::optimal(&lengths, n_buckets.into()).unwrap()
                else {
                    panic!("no boundaries")
                };
                assert!(
                    found.len() <= n_buckets as usize && found.is_sorted_by(|a, b| a < b),
                    "{found:?}"
                );
                assert_eq!(
                    padded(&lengths, &found),
                    brute_force(&lengths, n_buckets),
                    "{lengths:?}, {n_buckets}"
                );
            }
        }
    }

    #[test]
    fn large_tables_are_rejected() {
        let lengths: Vec<u32> = (0..20_000).collect();
        let error = Buckets::optimal(&lengths, 10_000).unwrap_err();
        assert_eq!(
            error,
            Error::TooMany {
                count: 200_000_000,
                what: "pairs of a bucket and a length",
                limit: 1 << 27
            }
        );
    }

    #[test]
    fn longest_lengths_do_not_overflow() {
        let huge = [u64::MAX, u64::MAX - 1, 5];
        assert_eq!(Buckets::optimal(huge, 2).unwrap(), Buckets::Boundaries(vec![5, u64::MAX]));
        assert_eq!(Buckets::Width(u64::MAX).longest(1), None);
    }
}
