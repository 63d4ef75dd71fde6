//! An order in which every window sees the classes in proportion.
//!
//! Each class is shuffled by itself, and its k-th sample of m gets the key (k + u) / m, with one
//! random u in [0, 1) for the class and epoch; then all samples are sorted by key. So each class is
//! spread evenly, with a random phase, as in systematic sampling. Scikit-learn's stratified splits
//! have the same purpose for a whole split; here it holds for every window, and so for every rank
//! of a contiguous partition and every batch of it.
//!
//! Between two keys there are as many samples of a class as the distance says, to less than one. So
//! of L neighbors in an order of M samples of C classes, L·m/M are of a class of m, give or take 1
//! + C·m/M.

use core_types::{Fingerprint, Seed};

use super::{exact, table};
use crate::error::{Error, Result};

/// How many samples of each class an epoch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Quota {
    /// All of them, once.
    All,
    /// At most this many, others in each epoch.
    Capped(u64),
    /// Exactly this many. A class that has fewer is read whole, again and again, in a new order
    /// each time.
    Fixed(u64),
}

impl Quota {
    fn of(self, class_len: u64) -> u64 {
        match self {
            Self::All => class_len,
            Self::Capped(most) => class_len.min(most),
            Self::Fixed(count) => count,
        }
    }
}

/// The samples of each class, and how many of them an epoch has.
#[derive(Clone, Debug)]
pub(crate) struct Strata {
    /// All samples, class by class.
    samples: Vec<u32>,
    classes: Vec<Class>,
    fingerprint: u64,
}

#[derive(Clone, Copy, Debug)]
struct Class {
    /// Where its samples end.
    end: usize,
    /// How many of them an epoch has.
    quota: u64,
}

impl Strata {
    /// The strata of a data set whose `n`-th sample is of class `labels[n]`.
    pub(crate) fn new(labels: &[u32], quota: Quota) -> Result<Self> {
        if labels.is_empty() {
            return Err(Error::EmptyDataSet);
        }
        let mut samples = table::allocate(labels.len() as u64)?;
        table::number(&mut samples, labels.len() as u64);
        // Not by a stable sort, which takes memory of its own.
        samples.sort_unstable_by_key(|&sample| (labels[sample as usize], sample));
        let mut end = 0;
        let classes = samples
            .chunk_by(|&a, &b| labels[a as usize] == labels[b as usize])
            .map(|class| {
                end += class.len();
                Class { end, quota: quota.of(class.len() as u64) }
            })
            .collect();
        let fingerprint: Fingerprint = labels.iter().copied().map(u64::from).collect();
        Ok(Self { samples, classes, fingerprint: fingerprint.finish() })
    }

    /// The samples of an epoch.
    pub(crate) fn len(&self) -> u64 {
        self.classes.iter().fold(0, |len, class| len.saturating_add(class.quota))
    }

    /// Tells a saved position whether it belongs to these classes.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Whether there is memory to sort an epoch's samples by key.
    pub(super) fn check_memory(&self) -> Result<()> {
        table::reserve::<(u64, u32)>(self.len())?;
        Ok(())
    }

    /// Makes `table` the order of the epoch of `seed`.
    #[expect(clippy::cast_possible_truncation, reason = "there is memory for an epoch")]
    pub(super) fn fill(&self, table: &mut Vec<u32>, seed: Seed) {
        let mut keyed = Vec::with_capacity(self.len() as usize);
        let mut start = 0;
        for (class, seed) in self.classes.iter().zip((0..).map(|label| seed.derive(label))) {
            spread(&self.samples[start..class.end], class.quota, seed, &mut keyed);
            start = class.end;
        }
        keyed.sort_unstable();
        table.clear();
        table.extend(keyed.into_iter().map(|(_, sample)| sample));
    }
}

/// Adds `quota` samples of a class, each with its key.
fn spread(samples: &[u32], quota: u64, seed: Seed, keyed: &mut Vec<(u64, u32)>) {
    let phase = seed.derive(u64::MAX).as_u64() >> 32;
    let passes = (0..).flat_map(|pass| shuffled(samples, seed.derive(pass)));
    keyed.extend((0..quota).zip(passes).map(|(k, sample)| (key(k, phase, quota), sample)));
}

/// (`k` + `phase` / 2^32) / `quota`, as a fraction of 2^64.
#[expect(
    clippy::cast_possible_truncation,
    reason = "k is below the quota, so the fraction is below 1"
)]
fn key(k: u64, phase: u64, quota: u64) -> u64 {
    ((u128::from(k << 32 | phase) << 32) / u128::from(quota)) as u64
}

fn shuffled(samples: &[u32], seed: Seed) -> Vec<u32> {
    let mut order = Vec::with_capacity(samples.len());
    exact::shuffle(&mut order, samples.len() as u64, seed);
    for place in &mut order {
        *place = samples[*place as usize];
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(labels: &[u32], quota: Quota, seed: u64) -> Vec<u32> {
        let strata = Strata::new(labels, quota).unwrap();
        let mut table = vec![u32::MAX; 3];
        strata.fill(&mut table, Seed::new(seed));
        table
    }

    fn sorted(mut samples: Vec<u32>) -> Vec<u32> {
        samples.sort_unstable();
        samples
    }

    /// Labels with `sizes[c]` samples of class c, interleaved.
    fn labels(sizes: &[usize]) -> Vec<u32> {
        let rounds = 0..*sizes.iter().max().unwrap();
        rounds
            .flat_map(|round| {
                (0..).zip(sizes).filter(move |(_, size)| round < **size).map(|(class, _)| 7 * class)
            })
            .collect()
    }

    #[test]
    fn every_sample_comes_once_and_otherwise_each_epoch() {
        let labels = labels(&[20, 5, 1]);
        assert_eq!(sorted(order(&labels, Quota::All, 0)), (0..26).collect::<Vec<_>>());
        assert_ne!(order(&labels, Quota::All, 0), order(&labels, Quota::All, 1));
        assert_eq!(order(&labels, Quota::All, 0)[..6], [5, 8, 9, 20, 22, 13]);
    }

    #[test]
    fn every_window_holds_the_classes_in_proportion() {
        for sizes in
            [&[20, 5, 1][..], &[10, 10], &[1, 1, 1, 1], &[50], &[30, 20, 10, 5, 3], &[64, 1]]
        {
            let labels = labels(sizes);
            let (len, n_classes) = (labels.len(), sizes.len());
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
    fn capped_classes_give_others_each_epoch_and_fixed_ones_repeat_evenly() {
        let labels = labels(&[20, 3]);
        let of = |order: &[u32], class| {
            order
                .iter()
                .copied()
                .filter(|&sample| labels[sample as usize] == class)
                .collect::<Vec<_>>()
        };
        let capped = order(&labels, Quota::Capped(5), 0);
        assert_eq!((of(&capped, 0).len(), of(&capped, 7).len()), (5, 3));
        assert_ne!(sorted(of(&capped, 0)), sorted(of(&order(&labels, Quota::Capped(5), 1), 0)));

        let fixed = of(&order(&labels, Quota::Fixed(8), 0), 7);
        let small_class = sorted(of(&(0..23).collect::<Vec<_>>(), 7));
        assert_eq!(fixed.len(), 8);
        assert_eq!(
            sorted(fixed[..3].to_vec()),
            small_class,
            "it is read whole before a sample comes again"
        );
        assert_eq!(sorted(fixed[3..6].to_vec()), small_class);
        assert_ne!(fixed[..3], fixed[3..6], "each pass has an order of its own");
    }
}
