//! Which lengths share a bucket.

use crate::{
    error::{Error, Result},
    lengths::{
        SequenceLengths,
        histogram::{Counter, Histogram, Run},
        measure,
        minima::row_minima,
    },
};

/// The lengths that share a bucket, and so may share a batch.
///
/// # Examples
///
/// Two buckets for these lengths: the best boundaries let the three long sequences alone.
///
/// ```
/// use dyn_batch::Buckets;
///
/// let lengths = [10_u32, 11, 12, 10, 13, 90, 100, 95];
/// assert_eq!(Buckets::optimal(&lengths, 2)?, Buckets::Boundaries(vec![13, 100]));
/// assert_eq!(Buckets::quantiles(&lengths, 2)?, Buckets::Boundaries(vec![12, 100]));
/// # Ok::<(), dyn_batch::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Buckets {
    /// Lengths of 0 to width − 1, of width to 2 width − 1, and so on.
    Width(u64),
    /// Lengths up to the first boundary, then up to the second, and so on; ascending, the longest
    /// sequence at the end.
    Boundaries(Vec<u64>),
}

impl Buckets {
    /// A reasonable width where nothing is known about the lengths.
    #[doc(hidden)]
    pub const DEFAULT_WIDTH: u64 = 64;

    /// At most `n_buckets` buckets with about as many sequences each.
    ///
    /// # Errors
    ///
    /// [`Error::Zero`] for no buckets, [`Error::NoLengths`] for no sequences, and
    /// [`Error::IndexOutOfRange`] if a sequence that is counted has no length.
    pub fn quantiles(lengths: impl SequenceLengths, n_buckets: u64) -> Result<Self> {
        let histogram = checked_histogram(lengths, n_buckets)?;
        let count = u128::from(histogram.count());
        let (mut boundaries, mut below) = (Vec::new(), 0);
        for run in histogram.runs() {
            below += u128::from(run.count);
            // One boundary for all quantiles that are reached with this length.
            if below * u128::from(n_buckets) / count > boundaries.len() as u128 {
                boundaries.push(run.length);
            }
        }
        Ok(Self::Boundaries(boundaries))
    }

    /// The at most `n_buckets` buckets for which the fewest tokens are padding if each sequence is
    /// padded to the boundary above it.
    ///
    /// They make the best of a fixed number of shapes, which compiled functions and captured graphs
    /// ask for; see [`fixed_shapes`](crate::BatchConfig::fixed_shapes).
    ///
    /// # Complexity
    ///
    /// O(n + K · D log D) time for n sequences of D different lengths and K buckets, O(K · D)
    /// memory: dynamic programming, in which the best last boundary moves only up as lengths are
    /// added, so that a search can bisect (Galil and Park, "Dynamic programming with convexity,
    /// concavity and sparsity", 1992).
    ///
    /// # Errors
    ///
    /// As [`quantiles`](Self::quantiles), and [`Error::TooManyBuckets`] if K · D is above 2^27.
    pub fn optimal(lengths: impl SequenceLengths, n_buckets: u64) -> Result<Self> {
        let histogram = checked_histogram(lengths, n_buckets)?;
        let n_lengths = histogram.runs().len() as u64;
        if n_buckets
            .min(n_lengths)
            .checked_mul(n_lengths)
            .is_none_or(|entries| entries > MAX_ENTRIES)
        {
            return Err(Error::TooManyBuckets { n_buckets, n_lengths, limit: MAX_ENTRIES });
        }
        Ok(Self::Boundaries(optimal_boundaries(histogram.runs(), n_buckets)))
    }

    pub(crate) fn check(&self) -> Result<()> {
        let Self::Boundaries(boundaries) = self else { return Ok(()) };
        if boundaries.is_empty() {
            return Err(Error::Zero { setting: "number of buckets" });
        }
        match boundaries.windows(2).find(|pair| pair[0] >= pair[1]) {
            Some(pair) => Err(Error::BoundariesNotAscending { boundary: pair[0], next: pair[1] }),
            None => Ok(()),
        }
    }

    /// The number of the bucket for this length.
    pub(crate) fn of(&self, length: u64) -> u64 {
        match self {
            Self::Width(width) => length / width,
            Self::Boundaries(boundaries) => {
                boundaries.partition_point(|&boundary| boundary < length) as u64
            }
        }
    }

    /// The longest sequence that the bucket of this number may hold; `None` if there is no such
    /// bucket, or no such length.
    pub(crate) fn longest(&self, bucket: u64) -> Option<u64> {
        match self {
            Self::Width(width) => bucket.checked_mul(*width)?.checked_add(width - 1),
            Self::Boundaries(boundaries) => boundaries.get(usize::try_from(bucket).ok()?).copied(),
        }
    }
}

fn checked_histogram(lengths: impl SequenceLengths, n_buckets: u64) -> Result<Histogram> {
    if n_buckets == 0 {
        return Err(Error::Zero { setting: "number of buckets" });
    }
    let mut counter = Counter::default();
    for index in 0..lengths.count() {
        counter.add(measure(&lengths, index)?.length);
    }
    let histogram = counter.finish();
    if histogram.count() == 0 { Err(Error::NoLengths) } else { Ok(histogram) }
}

/// The most entries of the table of cuts, of 4 bytes each.
const MAX_ENTRIES: u64 = 1 << 27;

/// Tokens, padding included, of many sequences; a few of 64-bit lengths can be more than 64 bits.
type Tokens = u128;

#[expect(clippy::cast_possible_truncation, reason = "the table of cuts is shorter than that")]
fn optimal_boundaries(runs: &[Run], n_buckets: u64) -> Vec<u64> {
    let n_buckets = n_buckets.min(runs.len() as u64) as usize;
    let mut below: Vec<Tokens> = vec![0];
    below.extend(runs.iter().scan(0, |sum, run| {
        *sum += Tokens::from(run.count);
        Some(*sum)
    }));
    let longest = |end: usize| Tokens::from(runs[end - 1].length);
    // best[end]: the fewest tokens of the shortest lengths up to `end`, with the buckets so far;
    // one to begin with.
    let mut best: Vec<Tokens> = vec![0];
    best.extend((1..below.len()).map(|end| below[end] * longest(end)));
    let mut cuts_of_levels = Vec::new();
    for _ in 1..n_buckets {
        let (mut fewer, mut cuts) = (vec![0; best.len()], vec![0_u32; best.len()]);
        // A bucket more, from `cut` to `end`: totally monotone, since a longer sequence costs more
        // for every other one.
        let tokens = |end: usize, cut: usize| best[cut] + (below[end] - below[cut]) * longest(end);
        row_minima(
            1..best.len(),
            0..best.len(),
            &|end| 0..end,
            &tokens,
            &mut |end, cut, tokens| {
                (fewer[end], cuts[end]) = (tokens, cut as u32);
            },
        );
        best = fewer;
        cuts_of_levels.push(cuts);
    }
    let mut ends = vec![runs.len()];
    for cuts in cuts_of_levels.iter().rev() {
        ends.push(cuts[ends[ends.len() - 1]] as usize);
    }
    // A bucket that is not needed ends where it begins, at 0.
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

    /// The fewest padded tokens by trying every set of boundaries.
    fn brute_force(lengths: &[u64], n_buckets: u32) -> u64 {
        let mut distinct = lengths.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let longest = distinct.pop();
        let subsets = (0..1_u32 << distinct.len()).filter(|subset| subset.count_ones() < n_buckets);
        let boundaries = |subset: u32| {
            let chosen = distinct
                .iter()
                .enumerate()
                .filter(move |(i, _)| subset >> i & 1 == 1)
                .map(|(_, &d)| d);
            chosen.chain(longest).collect::<Vec<_>>()
        };
        subsets.map(|subset| padded(lengths, &boundaries(subset))).min().unwrap()
    }

    #[test]
    fn no_boundaries_pad_less_than_the_optimal_ones() {
        for seed in 0..200_u64 {
            let draw = |i| core_types::Seed::new(seed).derive(i).as_u64() % (10 + seed);
            let lengths: Vec<u64> = (0..=seed % 12).map(draw).collect();
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
    fn quantiles_hold_about_as_many_sequences_each() {
        let lengths: Vec<u64> = (1..=100).collect();
        assert_eq!(
            Buckets::quantiles(&lengths, 4).unwrap(),
            Buckets::Boundaries(vec![25, 50, 75, 100])
        );
        assert_eq!(
            Buckets::quantiles([7_u64, 7, 7, 9], 2).unwrap(),
            Buckets::Boundaries(vec![7, 9])
        );
        assert_eq!(
            Buckets::quantiles([3_u64, 1], u64::MAX).unwrap(),
            Buckets::Boundaries(vec![1, 3])
        );
    }

    #[test]
    fn tables_too_large_are_refused() {
        let lengths: Vec<u32> = (0..20_000).collect();
        let error = Buckets::optimal(&lengths, 10_000).unwrap_err();
        assert_eq!(
            error,
            Error::TooManyBuckets { n_buckets: 10_000, n_lengths: 20_000, limit: 1 << 27 }
        );
    }

    #[test]
    fn longest_lengths_do_not_overflow() {
        let huge = [u64::MAX, u64::MAX - 1, 5];
        assert_eq!(Buckets::optimal(huge, 2).unwrap(), Buckets::Boundaries(vec![5, u64::MAX]));
        assert_eq!(Buckets::Width(u64::MAX).longest(1), None);
    }
}
