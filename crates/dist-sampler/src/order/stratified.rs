//! Stratified orders, where every window contains the classes in proportion.
//!
//! Each class is shuffled separately, and its k-th sample of m gets the key (k + u) / m, with one
//! random u in [0, 1) per class and epoch; then all samples are sorted by key. So each class is
//! spread evenly, with a random phase, as in systematic sampling. Scikit-learn's stratified splits
//! keep proportions for a whole split; here they hold for every window, and so for every rank of a
//! contiguous partition and each of its batches.
//!
//! The number of samples of a class between two keys matches their distance within one. So in an
//! order of M samples and C classes, L consecutive samples contain L·m/M samples of a class with m
//! samples, give or take 1 + C·m/M.

use core_types::{Fingerprint, Seed};

use super::{exact, table};
use crate::error::{Error, Result};

/// The number of samples of each class in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Quota {
    /// All samples of the class, once.
    All,
    /// At most this many samples, different ones in each epoch.
    Capped(u64),
    /// Exactly this many samples. A smaller class is read repeatedly, in a new order each time.
    Fixed(u64),
}

impl Quota {
    /// Returns the quota of a class with `class_len` samples.
    fn class_quota(self, class_len: u64) -> u64 {
        match self {
            Self::All => class_len,
            Self::Capped(most) => class_len.min(most),
            Self::Fixed(count) => count,
        }
    }
}

/// The samples of each class, and their quotas.
#[derive(Clone, Debug)]
pub(crate) struct ClassStrata {
    /// Samples, class by class.
    samples: Vec<u32>,
    classes: Vec<ClassRange>,
    fingerprint: u64,
}

#[derive(Clone, Copy, Debug)]
struct ClassRange {
    /// End of the class in the list of samples.
    end: usize,
    /// Number of samples per epoch.
    quota: u64,
}

impl ClassStrata {
    /// Creates the strata of a data set with the class `labels[n]` for sample n.
    pub(crate) fn new(labels: &[u32], quota: Quota) -> Result<Self> {
        if labels.is_empty() {
            return Err(Error::EmptyDataSet);
        }
        let mut samples = table::allocate(labels.len() as u64)?;
        table::fill_identity(&mut samples, labels.len() as u64);
        // The key contains the sample, because a stable sort by label would need additional memory.
        samples.sort_unstable_by_key(|&sample| (labels[sample as usize], sample));
        let mut end = 0;
        let classes = samples
            .chunk_by(|&a, &b| labels[a as usize] == labels[b as usize])
            .map(|class| {
                end += class.len();
                ClassRange { end, quota: quota.class_quota(class.len() as u64) }
            })
            .collect();
        let fingerprint: Fingerprint = labels.iter().copied().map(u64::from).collect();
        Ok(Self { samples, classes, fingerprint: fingerprint.finish() })
    }

    /// Returns the number of samples in an epoch.
    pub(crate) fn len(&self) -> u64 {
        self.classes.iter().fold(0, |len, class| len.saturating_add(class.quota))
    }

    /// Returns a hash of the classes.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Checks that an epoch is short enough, and that there is memory to sort its samples.
    pub(super) fn check_memory(&self) -> Result<()> {
        table::check_len(self.len())?;
        table::reserve::<(u64, u32)>(self.len())?;
        Ok(())
    }

    /// Fills `table` with the order of the epoch of `seed`.
    #[expect(clippy::cast_possible_truncation, reason = "`check_memory` has reserved as much")]
    pub(super) fn fill(&self, table: &mut Vec<u32>, seed: Seed) {
        let mut keyed = Vec::with_capacity(self.len() as usize);
        let mut start = 0;
        for (class, number) in self.classes.iter().zip(0..) {
            let class_seed = seed.derive(number);
            push_keyed(&self.samples[start..class.end], class.quota, class_seed, &mut keyed);
            start = class.end;
        }
        keyed.sort_unstable();
        table.clear();
        table.extend(keyed.into_iter().map(|(_, sample)| sample));
    }
}

/// Adds `quota` samples of a class with their keys to `keyed`.
fn push_keyed(samples: &[u32], quota: u64, seed: Seed, keyed: &mut Vec<(u64, u32)>) {
    let phase = seed.derive(u64::MAX).as_u64() >> 32;
    let passes = (0..).flat_map(|pass| shuffle_samples(samples, seed.derive(pass)));
    keyed.extend((0..quota).zip(passes).map(|(k, sample)| (key(k, phase, quota), sample)));
}

/// Returns (`k` + `phase` / 2^32) / `quota`, as a fraction of 2^64.
#[expect(
    clippy::cast_possible_truncation,
    reason = "k is less than the quota, so the fraction is less than 1"
)]
fn key(k: u64, phase: u64, quota: u64) -> u64 {
    ((u128::from((k << 32) | phase) << 32) / u128::from(quota)) as u64
}

fn shuffle_samples(samples: &[u32], seed: Seed) -> Vec<u32> {
    let mut order = Vec::with_capacity(samples.len());
    exact::shuffle(&mut order, samples.len() as u64, seed);
    for entry in &mut order {
        *entry = samples[*entry as usize];
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(labels: &[u32], quota: Quota, seed: u64) -> Vec<u32> {
        let strata = ClassStrata::new(labels, quota).unwrap();
        let mut table = vec![u32::MAX; 3];
        strata.fill(&mut table, Seed::new(seed));
        table
    }

    #[test]
    fn long_epochs_are_rejected_before_memory_is_taken() {
        let strata = ClassStrata::new(&[0, 1], Quota::Fixed(1 << 40)).unwrap();
        let too_long = Error::TooLongToShuffle { len: 2 << 40, max: table::MAX_LEN };
        assert_eq!(strata.check_memory(), Err(too_long));
    }

    fn sorted(mut samples: Vec<u32>) -> Vec<u32> {
        samples.sort_unstable();
        samples
    }

    /// Interleaves labels with `sizes[c]` samples of class c.
    fn labels(sizes: &[usize]) -> Vec<u32> {
        let rounds = 0..*sizes.iter().max().unwrap();
        rounds
            .flat_map(|round| {
                (0..).zip(sizes).filter(move |(_, size)| round < **size).map(|(class, _)| 7 * class)
            })
            .collect()
    }

    #[test]
    fn epochs_differ_in_order() {
        let labels = labels(&[20, 5, 1]);
        assert_eq!(sorted(order(&labels, Quota::All, 0)), (0..26).collect::<Vec<_>>());
        assert_ne!(order(&labels, Quota::All, 0), order(&labels, Quota::All, 1));
        assert_eq!(order(&labels, Quota::All, 0)[..6], [5, 8, 9, 20, 22, 13]);
    }

    #[test]
    fn windows_keep_the_proportions() {
        for sizes in
            [&[20, 5, 1][..], &[10, 10], &[1, 1, 1, 1], &[50], &[30, 20, 10, 5, 3], &[64, 1]]
        {
            let labels = labels(sizes);
            let len = labels.len();
            let n_classes = sizes.len();
            for seed in 0..20 {
                let order = order(&labels, Quota::All, seed);
                for (start, end) in
                    (0..len).flat_map(|start| (start + 1..=len).map(move |end| (start, end)))
                {
                    for (class, &size) in (0..).zip(sizes) {
                        let found = order[start..end]
                            .iter()
                            .filter(|&&sample| labels[sample as usize] == 7 * class)
                            .count();
                        let off = (found * len).abs_diff((end - start) * size);
                        assert!(
                            off <= len + n_classes * size,
                            "{sizes:?} {start}..{end}: {found} of class {class}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn quotas_are_kept() {
        let labels = labels(&[20, 3]);
        let in_class = |order: &[u32], class| {
            order
                .iter()
                .copied()
                .filter(|&sample| labels[sample as usize] == class)
                .collect::<Vec<_>>()
        };
        let capped = order(&labels, Quota::Capped(5), 0);
        assert_eq!((in_class(&capped, 0).len(), in_class(&capped, 7).len()), (5, 3));
        let next_epoch = order(&labels, Quota::Capped(5), 1);
        assert_ne!(sorted(in_class(&capped, 0)), sorted(in_class(&next_epoch, 0)));

        let fixed = in_class(&order(&labels, Quota::Fixed(8), 0), 7);
        let small_class = sorted(in_class(&(0..23).collect::<Vec<_>>(), 7));
        assert_eq!(fixed.len(), 8);
        assert_eq!(sorted(fixed[..3].to_vec()), small_class, "a pass has every sample");
        assert_eq!(sorted(fixed[3..6].to_vec()), small_class);
        assert_ne!(fixed[..3], fixed[3..6], "passes differ in order");
    }
}
