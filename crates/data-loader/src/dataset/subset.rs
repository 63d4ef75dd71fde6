//! Some samples of a data set, and random splits.

use std::{iter, sync::Arc};

use core_types::{Fingerprint, Seed, shuffle};

use crate::{
    dataset::Dataset,
    error::{BoxError, Error, Result},
};

/// Some samples of a data set, from [`Dataset::subset`] and [`Dataset::random_split`].
#[derive(Clone, Debug)]
pub struct SubsetDataset<D> {
    dataset: D,
    indices: Vec<u64>,
}

impl<D> SubsetDataset<D> {
    pub(crate) fn new(dataset: D, indices: Vec<u64>) -> Self {
        Self { dataset, indices }
    }

    fn whole_index(&self, index: u64) -> Result<u64> {
        let whole = usize::try_from(index).ok().and_then(|index| self.indices.get(index));
        let len = self.indices.len() as u64;
        whole.copied().ok_or(Error::IndexOutOfRange { index, len })
    }

    /// Returns the indices in the whole data set, without those that are out of range.
    fn whole_indices(&self, indices: &[u64]) -> Vec<u64> {
        indices.iter().filter_map(|&index| self.whole_index(index).ok()).collect()
    }
}

impl<D: Dataset> Dataset for SubsetDataset<D> {
    type Item = D::Item;

    fn len(&self) -> u64 {
        self.indices.len() as u64
    }

    fn read(&self, index: u64) -> Result<D::Item, BoxError> {
        self.dataset.read(self.whole_index(index)?)
    }

    fn read_seeded(&self, index: u64, seed: Seed) -> Result<D::Item, BoxError> {
        self.dataset.read_seeded(self.whole_index(index)?, seed)
    }

    fn check(&self, indices: &[u64]) -> Result<(), BoxError> {
        self.dataset.check(&self.whole_indices(indices))
    }

    fn prefetch(&self, indices: &[u64]) {
        self.dataset.prefetch(&self.whole_indices(indices));
    }

    fn fingerprint(&self) -> Option<u64> {
        let mut fingerprint = Fingerprint::new();
        fingerprint.write_u64(self.dataset.fingerprint()?);
        fingerprint.extend(self.indices.iter().copied());
        Some(fingerprint.finish())
    }
}

/// Splits a data set into disjoint random subsets.
pub(crate) fn random_split<D: Dataset>(
    dataset: D,
    fractions: &[f64],
    seed: Seed,
) -> Result<Vec<SubsetDataset<Arc<D>>>> {
    let mut indices: Vec<u64> = (0..dataset.len()).collect();
    let ends = ends_of_fractions(indices.len(), fractions)?;
    let mut n_drawn = 0;
    shuffle(&mut indices, |n| {
        n_drawn += 1;
        draw_below(seed.derive(n_drawn), n)
    });
    let dataset = Arc::new(dataset);
    let starts = iter::once(0).chain(ends.iter().copied());
    let parts = starts.zip(&ends).map(|(start, &end)| {
        let mut part = indices[start..end].to_vec();
        part.sort_unstable();
        Arc::clone(&dataset).subset(part)
    });
    Ok(parts.collect())
}

/// Returns a number below `n`: the upper half of a product, with a bias below n / 2^64.
fn draw_below(seed: Seed, n: u64) -> u64 {
    ((u128::from(seed.as_u64()) * u128::from(n)) >> 64) as u64
}

/// Returns the end of each fraction of `len` items, rounded.
fn ends_of_fractions(len: usize, fractions: &[f64]) -> Result<Vec<usize>> {
    /// Sums such as 0.7 + 0.2 + 0.1 may be off by rounding.
    const TOLERANCE: f64 = 1e-9;
    let mut sum = 0.0;
    let mut ends = Vec::with_capacity(fractions.len());
    for &fraction in fractions {
        sum += fraction;
        if !(fraction >= 0.0 && sum <= 1.0 + TOLERANCE) {
            let expected = "at least 0, with a sum of at most 1";
            return Err(Error::setting("a fraction of a split", &fraction, expected));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and the length"
        )]
        let end = (len as f64 * sum).round() as usize;
        ends.push(end.min(len));
    }
    Ok(ends)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_cover_the_whole() {
        for len in 0..50 {
            let ends = ends_of_fractions(len, &[0.7, 0.2, 0.1]).unwrap();
            assert_eq!(ends[2], len);
            assert!(ends[0] <= ends[1] && ends[1] <= len);
        }
        for fractions in [&[0.5, 0.6][..], &[-0.1], &[f64::NAN], &[f64::INFINITY]] {
            assert!(ends_of_fractions(10, fractions).is_err(), "{fractions:?}");
        }
    }
}
