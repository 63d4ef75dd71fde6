//! Samples that stay in memory once they are read.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{PoisonError, RwLock},
};

use crate::{
    dataset::Dataset,
    error::{BoxError, Result},
};

/// Samples that stay in memory once they are read, from [`Dataset::cached`].
pub struct CachedDataset<D: Dataset> {
    dataset: D,
    max_bytes: u64,
    bytes: fn(&D::Item) -> u64,
    cache: RwLock<SampleCache<D::Item>>,
}

struct SampleCache<T> {
    samples: BTreeMap<u64, T>,
    n_bytes: u64,
}

impl<D: Dataset> CachedDataset<D> {
    pub(crate) fn new(dataset: D, max_bytes: u64, bytes: fn(&D::Item) -> u64) -> Self {
        let cache = RwLock::new(SampleCache { samples: BTreeMap::new(), n_bytes: 0 });
        Self { dataset, max_bytes, bytes, cache }
    }
}

impl<D: Dataset<Item: Clone + Sync>> Dataset for CachedDataset<D> {
    type Item = D::Item;

    fn len(&self) -> u64 {
        self.dataset.len()
    }

    fn read(&self, index: u64) -> Result<D::Item, BoxError> {
        let cache = self.cache.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(sample) = cache.samples.get(&index) {
            return Ok(sample.clone());
        }
        drop(cache);
        // Reads without the lock; two threads may read the same sample.
        let sample = self.dataset.read(index)?;
        let n_bytes = (self.bytes)(&sample);
        let mut cache = self.cache.write().unwrap_or_else(PoisonError::into_inner);
        let total = cache.n_bytes.saturating_add(n_bytes);
        if total <= self.max_bytes && !cache.samples.contains_key(&index) {
            cache.samples.insert(index, sample.clone());
            cache.n_bytes = total;
        }
        Ok(sample)
    }

    fn prefetch(&self, indices: &[u64]) {
        let cache = self.cache.read().unwrap_or_else(PoisonError::into_inner);
        let unread = |index: &u64| !cache.samples.contains_key(index);
        let missing: Vec<u64> = indices.iter().copied().filter(unread).collect();
        drop(cache);
        self.dataset.prefetch(&missing);
    }

    fn fingerprint(&self) -> Option<u64> {
        self.dataset.fingerprint()
    }
}

impl<D: Dataset + fmt::Debug> fmt::Debug for CachedDataset<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedDataset")
            .field("dataset", &self.dataset)
            .field("max_bytes", &self.max_bytes)
            .finish_non_exhaustive()
    }
}
