//! Data sets of many shards with few open at a time.

use std::{collections::BTreeSet, sync::Arc};

use core_types::{Fingerprint, Seed};

use crate::{
    dataset::{
        Dataset,
        concat::{ends_of, locate},
    },
    error::{BoxError, Error, Result},
    read::open_cache::OpenCache,
};

/// The shards of a [`ShardedDataset`]: how many samples each has, and how to open one.
pub trait ShardSource: Send + Sync {
    /// An open shard.
    type Shard: Dataset;

    /// Returns the number of samples of each shard, for example from an index file.
    fn shard_lens(&self) -> Vec<u64>;

    /// Opens a shard: downloads, decompresses or maps it.
    ///
    /// # Errors
    ///
    /// Any error. It becomes the error of each sample that needs the shard, and the next sample
    /// tries again.
    fn open(&self, shard: usize) -> Result<Self::Shard, BoxError>;
}

/// The samples of many shards, one shard after the other. A limited number of shards is open: the
/// least recently used one is closed for another.
///
/// One thread opens a shard, and other threads that need it wait. Read it in the order of
/// `DistributedSampler::sharded`, which uses few shards at a time.
///
/// # Examples
///
/// ```
/// use data_loader::{BoxError, Dataset, ShardSource, ShardedDataset};
///
/// struct Hundreds;
///
/// impl ShardSource for Hundreds {
///     type Shard = Vec<u64>;
///
///     fn shard_lens(&self) -> Vec<u64> {
///         vec![100; 7]
///     }
///
///     fn open(&self, shard: usize) -> Result<Vec<u64>, BoxError> {
///         let start = shard as u64 * 100;
///         Ok((start..start + 100).collect())
///     }
/// }
///
/// let numbers = ShardedDataset::new(Hundreds, 3)?;
/// assert_eq!((numbers.len(), numbers.read(612)?), (700, 612));
/// # Ok::<(), data_loader::BoxError>(())
/// ```
#[derive(Debug)]
pub struct ShardedDataset<S: ShardSource> {
    source: S,
    /// End of each shard.
    ends: Vec<u64>,
    max_open: usize,
    open_shards: OpenCache<S::Shard>,
}

impl<S: ShardSource> ShardedDataset<S> {
    /// Creates a data set with at most `max_open` open shards, plus closed shards that threads still
    /// read.
    ///
    /// Use at least the number of lanes of the sampler over the number of ranks, plus one per
    /// worker.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for 0 open shards.
    pub fn new(source: S, max_open: usize) -> Result<Self> {
        if max_open == 0 {
            return Err(Error::setting("the number of open shards", &max_open, "at least 1"));
        }
        let ends = ends_of(source.shard_lens());
        Ok(Self { source, ends, max_open, open_shards: OpenCache::new(max_open) })
    }

    fn shard(&self, index: u64) -> Result<(Arc<S::Shard>, u64), BoxError> {
        let (shard, index) = locate(&self.ends, index)?;
        let opened = self.open_shards.get(shard as u64, || self.open(shard))?;
        Ok((opened, index))
    }

    fn open(&self, shard: usize) -> Result<S::Shard, BoxError> {
        let opened = self.source.open(shard)?;
        let start = if shard == 0 { 0 } else { self.ends[shard - 1] };
        let (expected, found) = (self.ends[shard] - start, opened.len());
        if expected != found {
            return Err(Error::LengthMismatch { what: "an open shard", found, expected }.into());
        }
        Ok(opened)
    }
}

impl<S: ShardSource> Dataset for ShardedDataset<S> {
    type Item = <S::Shard as Dataset>::Item;

    fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn read(&self, index: u64) -> Result<Self::Item, BoxError> {
        let (shard, index) = self.shard(index)?;
        shard.read(index)
    }

    fn read_seeded(&self, index: u64, seed: Seed) -> Result<Self::Item, BoxError> {
        let (shard, index) = self.shard(index)?;
        let sample = shard.read_seeded(index, seed);
        // Checked at once, because the shard may be closed before the end of the batch.
        shard.check(&[index]).and(sample)
    }

    /// Opens the shards of these samples that no other thread is opening, so that workers with the
    /// same shards open different ones.
    fn prefetch(&self, indices: &[u64]) {
        let located = indices.iter().filter_map(|&index| locate(&self.ends, index).ok());
        let shards: BTreeSet<usize> = located.map(|(shard, _)| shard).collect();
        for shard in shards.into_iter().take(self.max_open) {
            if !self.open_shards.contains(shard as u64) {
                // The sample that needs the shard tries again and returns the error.
                drop(self.open_shards.get(shard as u64, || self.open(shard)));
            }
        }
    }

    fn fingerprint(&self) -> Option<u64> {
        Some(self.ends.iter().copied().collect::<Fingerprint>().finish())
    }
}
