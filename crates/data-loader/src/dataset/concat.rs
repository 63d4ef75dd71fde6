//! Concatenated data sets.

use core_types::{Fingerprint, Placement, Seed};
use dist_sampler::{DistributedSampler, MixtureEnd, MixturePart, SamplerConfig, Tail};

use crate::{
    dataset::Dataset,
    error::{BoxError, Error, Result},
};

/// Concatenates the samples of several data sets.
///
/// # Examples
///
/// ```
/// use data_loader::{Dataset, concat};
///
/// let both = concat([vec!['a', 'b'], vec!['c']]);
/// assert_eq!((both.len(), both.read(2)?), (3, 'c'));
/// # Ok::<(), data_loader::BoxError>(())
/// ```
pub fn concat<D: Dataset>(datasets: impl IntoIterator<Item = D>) -> ConcatDataset<D> {
    let datasets: Vec<D> = datasets.into_iter().collect();
    let ends = ends_of(datasets.iter().map(Dataset::len));
    ConcatDataset { datasets, ends }
}

/// Returns the end of each range of these lengths. A sum beyond 64 bits saturates, and samplers
/// reject it as a length.
pub(crate) fn ends_of(lens: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let ends = lens.into_iter().scan(0_u64, |end, len| {
        *end = end.saturating_add(len);
        Some(*end)
    });
    ends.collect()
}

/// Concatenated data sets, from [`concat()`].
#[derive(Clone, Debug)]
pub struct ConcatDataset<D> {
    datasets: Vec<D>,
    /// End of each data set.
    ends: Vec<u64>,
}

/// Returns the range that contains `index`, and the index in it, given the ends of the ranges.
pub(crate) fn locate(ends: &[u64], index: u64) -> Result<(usize, u64)> {
    let range = ends.partition_point(|&end| end <= index);
    if range == ends.len() {
        return Err(Error::IndexOutOfRange { index, len: ends.last().copied().unwrap_or(0) });
    }
    let start = if range == 0 { 0 } else { ends[range - 1] };
    Ok((range, index - start))
}

impl<D: Dataset> ConcatDataset<D> {
    /// Returns an order that mixes the data sets in proportion to their weights, for
    /// [`LoaderBuilder::sampler`](crate::LoaderBuilder::sampler).
    ///
    /// The samples of each are shuffled with `seed`. Samples that do not fill a round of all ranks are
    /// dropped. The weights hold for all ranks together, not for each. [`DistributedSampler::mixture`] has
    /// other orders and tails.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] unless there is one weight per data set, and [`Error::Sampler`].
    ///
    /// # Examples
    ///
    /// ```
    /// use core_types::{Epoch, Seed};
    /// use data_loader::{DataLoader, SampleBatch, concat};
    /// use dist_sampler::MixtureEnd;
    ///
    /// let data = concat([vec!['a'; 90], vec!['b'; 10]]);
    /// let mixture = data.mixture(&[3, 1], MixtureEnd::Repeat { len: 100 }, Seed::new(7))?;
    /// let mut loader = DataLoader::builder(data)
    ///     .sampler(mixture.with_weights_from(40, &[1, 1])?)
    ///     .batch_size(20)
    ///     .collate(|letters: SampleBatch<char>| Ok(letters.items))?;
    /// loader.set_epoch(Epoch::ZERO)?;
    /// let first = loader.next().expect("an epoch has a batch")?;
    /// assert_eq!(first.iter().filter(|&&letter| letter == 'b').count(), 5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn mixture(
        &self,
        weights: &[u64],
        end: MixtureEnd,
        seed: Seed,
    ) -> Result<DistributedSampler> {
        if weights.len() != self.datasets.len() {
            let expected = "one per data set";
            return Err(Error::setting("the number of weights", &weights.len(), expected));
        }
        let parts = self.datasets.iter().zip(weights);
        let parts: Vec<_> =
            parts.map(|(data, &weight)| MixturePart::new(data.len(), weight)).collect();
        let config = SamplerConfig::default().with_seed(seed).with_tail(Tail::Drop);
        Ok(DistributedSampler::mixture(&parts, end, Placement::SINGLE, config)?)
    }

    /// Returns the indices in each data set, without those that are out of range.
    fn per_dataset(&self, indices: &[u64]) -> Vec<Vec<u64>> {
        let mut per_dataset = vec![Vec::new(); self.datasets.len()];
        for (dataset, index) in indices.iter().filter_map(|&index| locate(&self.ends, index).ok()) {
            per_dataset[dataset].push(index);
        }
        per_dataset
    }
}

impl<D: Dataset> Dataset for ConcatDataset<D> {
    type Item = D::Item;

    fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn read(&self, index: u64) -> Result<D::Item, BoxError> {
        let (dataset, index) = locate(&self.ends, index)?;
        self.datasets[dataset].read(index)
    }

    fn read_seeded(&self, index: u64, seed: Seed) -> Result<D::Item, BoxError> {
        let (dataset, index) = locate(&self.ends, index)?;
        self.datasets[dataset].read_seeded(index, seed)
    }

    fn check(&self, indices: &[u64]) -> Result<(), BoxError> {
        let per_dataset = self.per_dataset(indices);
        self.datasets.iter().zip(&per_dataset).try_for_each(|(one, indices)| one.check(indices))
    }

    fn prefetch(&self, indices: &[u64]) {
        for (dataset, indices) in self.datasets.iter().zip(&self.per_dataset(indices)) {
            dataset.prefetch(indices);
        }
    }

    fn fingerprint(&self) -> Option<u64> {
        let mut fingerprint = Fingerprint::new();
        for dataset in &self.datasets {
            fingerprint.extend([dataset.len(), dataset.fingerprint()?]);
        }
        Some(fingerprint.finish())
    }
}
