//! Data sets: samples that can be read in any order.

pub(crate) mod concat;
pub(crate) mod map;
pub(crate) mod measure;
pub(crate) mod subset;

use std::sync::Arc;

use core_types::Seed;

use crate::{
    dataset::{map::MapDataset, subset::SubsetDataset},
    error::{BoxError, Error, Result},
};

/// Samples that can be read in any order, by several threads at once.
///
/// Vectors are data sets, and so are shared and boxed data sets. `map` and the other
/// adaptors change samples when they are read.
///
/// # Determinism
///
/// [`read`](Self::read) must return the same sample for an index each time, and on each rank.
///
/// # Examples
///
/// ```
/// use data_loader::Dataset;
///
/// let squares = vec![1_u32, 2, 3, 4].map(|n| Ok(n * n));
/// assert_eq!((squares.len(), squares.read(2)?), (4, 9));
/// let (train, test) = match &squares.random_split(&[0.75, 0.25], core_types::Seed::new(1))?[..] {
///     [train, test] => (train.len(), test.len()),
///     _ => unreachable!(),
/// };
/// assert_eq!((train, test), (3, 1));
/// # Ok::<(), data_loader::BoxError>(())
/// ```
#[doc(alias = "IDataset")]
pub trait Dataset: Send + Sync {
    /// A sample.
    type Item: Send + 'static;

    /// Returns the number of samples.
    fn len(&self) -> u64;

    /// Reads a sample.
    ///
    /// # Errors
    ///
    /// Any error, in particular [`Error::IndexOutOfRange`] if the index is not below the length.
    fn read(&self, index: u64) -> Result<Self::Item, BoxError>;

    /// Reads a sample; `seed` determines its random changes in this epoch.
    ///
    /// Loaders call this method, and use the sample once [`check`](Self::check) has accepted it. Data
    /// sets with random changes implement it: see [`map_seeded`](Self::map_seeded). A data set that
    /// calls it on another one must also forward `check`.
    ///
    /// # Errors
    ///
    /// The errors of [`read`](Self::read).
    fn read_seeded(&self, index: u64, seed: Seed) -> Result<Self::Item, BoxError> {
        let _ = seed;
        self.read(index)
    }

    /// Checks samples that [`read_seeded`](Self::read_seeded) has returned, for example whether their
    /// file has changed since it was opened. Loaders call this method once per batch, so data sets
    /// need not check each sample in `read_seeded`; [`read`](Self::read) checks its sample itself.
    ///
    /// # Errors
    ///
    /// Any error. The loader then reads each sample again and checks it alone.
    fn check(&self, indices: &[u64]) -> Result<(), BoxError> {
        let _ = indices;
        Ok(())
    }

    /// Announces that a thread is about to read these samples, for example to open their shards.
    fn prefetch(&self, indices: &[u64]) {
        let _ = indices;
    }

    /// Returns a hash that differs for other contents, or `None` if the data set cannot compute it.
    ///
    /// A loader compares it when it resumes.
    fn fingerprint(&self) -> Option<u64> {
        None
    }

    /// Returns true if there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns all samples in order, for example of a small data set for an evaluation.
    fn samples(&self) -> impl Iterator<Item = Result<Self::Item, BoxError>>
    where
        Self: Sized,
    {
        (0..self.len()).map(|index| self.read(index))
    }

    /// Returns the same samples, each changed by `f` when it is read.
    fn map<T, F>(
        self,
        f: F,
    ) -> MapDataset<Self, impl Fn(Self::Item, Seed) -> Result<T, BoxError> + Send + Sync>
    where
        Self: Sized,
        T: Send + 'static,
        F: Fn(Self::Item) -> Result<T, BoxError> + Send + Sync,
    {
        MapDataset::new(self, move |sample, _| f(sample))
    }

    /// Like [`map`](Self::map), with a seed for random changes.
    ///
    /// # Determinism
    ///
    /// The seed depends on the seed of the loader, the epoch and the index of the sample, not on
    /// the worker or rank that reads it.
    ///
    /// # Examples
    ///
    /// ```
    /// use data_loader::{DataLoader, Dataset, SampleBatch};
    /// use core_types::{Epoch, Seed};
    ///
    /// let noisy = vec![0_u64; 8].map_seeded(|n, seed| Ok(n + seed.as_u64() % 100));
    /// let epoch = |workers| -> data_loader::Result<Vec<Vec<u64>>> {
    ///     let mut loader = DataLoader::builder(noisy.clone())
    ///         .shuffle(Seed::new(1))
    ///         .num_workers(workers)
    ///         .collate(|batch: SampleBatch<u64>| Ok(batch.items))?;
    ///     loader.set_epoch(Epoch::new(3))?;
    ///     loader.collect()
    /// };
    /// assert_eq!(epoch(0)?, epoch(2)?);
    /// # Ok::<(), data_loader::Error>(())
    /// ```
    fn map_seeded<T, F>(self, f: F) -> MapDataset<Self, F>
    where
        Self: Sized,
        T: Send + 'static,
        F: Fn(Self::Item, Seed) -> Result<T, BoxError> + Send + Sync,
    {
        MapDataset::new(self, f)
    }

    /// Returns the samples at these indices, which may repeat.
    fn subset(self, indices: Vec<u64>) -> SubsetDataset<Self>
    where
        Self: Sized,
    {
        SubsetDataset::new(self, indices)
    }

    /// Splits the data set into disjoint random subsets, such as one for training and one for
    /// validation. The samples of each subset stay in the order of the data set.
    ///
    /// # Complexity
    ///
    /// 8 bytes per sample.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if a fraction is negative or not a number, or if their sum exceeds 1.
    fn random_split(self, fractions: &[f64], seed: Seed) -> Result<Vec<SubsetDataset<Arc<Self>>>>
    where
        Self: Sized,
    {
        subset::random_split(self, fractions, seed)
    }
}

impl<T: Clone + Send + Sync + 'static> Dataset for Vec<T> {
    type Item = T;

    fn len(&self) -> u64 {
        self.as_slice().len() as u64
    }

    fn read(&self, index: u64) -> Result<T, BoxError> {
        let sample = usize::try_from(index).ok().and_then(|index| self.get(index));
        Ok(sample.cloned().ok_or(Error::IndexOutOfRange { index, len: Dataset::len(self) })?)
    }
}

/// Implements the trait for a pointer to a data set.
macro_rules! pointers {
    ($($pointer:ty),*) => {$(
        impl<D: Dataset + ?Sized> Dataset for $pointer {
            type Item = D::Item;

            fn len(&self) -> u64 {
                (**self).len()
            }

            fn read(&self, index: u64) -> Result<D::Item, BoxError> {
                (**self).read(index)
            }

            fn read_seeded(&self, index: u64, seed: Seed) -> Result<D::Item, BoxError> {
                (**self).read_seeded(index, seed)
            }

            fn check(&self, indices: &[u64]) -> Result<(), BoxError> {
                (**self).check(indices)
            }

            fn prefetch(&self, indices: &[u64]) {
                (**self).prefetch(indices);
            }

            fn fingerprint(&self) -> Option<u64> {
                (**self).fingerprint()
            }
        }
    )*};
}

pointers!(&D, Arc<D>, Box<D>);
