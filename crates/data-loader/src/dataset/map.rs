//! Data sets that change samples when they are read.

use core_types::Seed;

use crate::{
    dataset::Dataset,
    error::{BoxError, Result},
};

/// Changed samples, from [`Dataset::map`] and [`Dataset::map_seeded`].
#[derive(Clone, Debug)]
pub struct MapDataset<D, F> {
    dataset: D,
    f: F,
}

/// Streams derived from a sample's seed: one for the wrapped data set, one for the function. With the
/// same stream, nested random changes would be correlated.
const WRAPPED_STREAM: u64 = 0;
const FUNCTION_STREAM: u64 = 1;

impl<D, F> MapDataset<D, F> {
    pub(crate) fn new(dataset: D, f: F) -> Self {
        Self { dataset, f }
    }
}

impl<D, T, F> Dataset for MapDataset<D, F>
where
    D: Dataset,
    T: Send + 'static,
    F: Fn(D::Item, Seed) -> Result<T, BoxError> + Send + Sync,
{
    type Item = T;

    fn len(&self) -> u64 {
        self.dataset.len()
    }

    /// Reads a sample, with random changes from a fixed seed.
    fn read(&self, index: u64) -> Result<T, BoxError> {
        let sample = self.read_seeded(index, Seed::default().derive(index));
        // Check afterwards, as loaders do: a changed file explains a failed read better.
        self.check(&[index])?;
        sample
    }

    fn read_seeded(&self, index: u64, seed: Seed) -> Result<T, BoxError> {
        let sample = self.dataset.read_seeded(index, seed.derive(WRAPPED_STREAM))?;
        (self.f)(sample, seed.derive(FUNCTION_STREAM))
    }

    fn check(&self, indices: &[u64]) -> Result<(), BoxError> {
        self.dataset.check(indices)
    }

    fn prefetch(&self, indices: &[u64]) {
        self.dataset.prefetch(indices);
    }

    fn fingerprint(&self) -> Option<u64> {
        self.dataset.fingerprint()
    }
}
