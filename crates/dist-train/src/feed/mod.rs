//! Batches prepared ahead of their steps.

mod ahead;

use rayon::ThreadPoolBuilder;

pub use self::ahead::Feeding;
use crate::error::{Error, Result};

/// Makes batches on background threads while steps run, like the workers of PyTorch's `DataLoader`.
///
/// Each of the `inputs`, such as the steps of a sampler, becomes a batch, by the function that
/// [`collate`](Feed::collate) sets. The result equals `inputs.map(f)`, in order, for any number of
/// threads.
///
/// # Determinism
///
/// As deterministic as `inputs` and the function. Random numbers in the function must depend on
/// its input, such as the index of the step, and not on a generator shared by threads.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use dist_train::feed;
///
/// let texts = ["to be", "or not", "to be"];
/// let indices = [2, 0, 1]; // from a sampler
/// let bytes = move |index: usize| Tensor::new(texts[index].as_bytes(), &Device::Cpu);
/// for (batch, index) in feed(indices).threads(2).collate(bytes)?.zip(indices) {
///     assert_eq!(batch?.to_vec1::<u8>()?, texts[index].as_bytes());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "DataLoader")]
pub fn feed<I: IntoIterator>(inputs: I) -> Feed<I::IntoIter> {
    Feed { inputs: inputs.into_iter(), threads: 1, depth: None }
}

/// A builder for [`feed`]: the number of threads and of prefetched batches.
#[derive(Clone, Debug)]
#[must_use = "nothing is made before `collate`"]
pub struct Feed<I> {
    inputs: I,
    threads: usize,
    depth: Option<usize>,
}

impl<I: Iterator> Feed<I> {
    /// Sets the number of threads; 1 by default. With 0, the consumer's thread makes each batch on
    /// request. (`num_workers` of PyTorch's `DataLoader`.)
    ///
    /// These threads share the CPU with the slots of a mesh:
    /// [`init_threads`](pmap_mesh::init_threads) assigns threads to slots only.
    pub fn threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    /// Sets the maximum number of batches that are ready or in progress; two per thread by default.
    /// Reserve memory for one more batch, which the current step uses. (PyTorch's `prefetch_factor`
    /// times `num_workers`.)
    pub fn depth(self, batches: usize) -> Self {
        Self { depth: Some(batches), ..self }
    }

    /// Starts the threads; `f` makes a batch from an item of the iterator.
    ///
    /// The thread that takes the batches also advances the iterator, so the iterator may borrow.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Setting`] if the depth is 0 although there are threads, and
    /// [`Error::Threads`] if the operating system fails to start the threads.
    pub fn collate<T, F>(self, f: F) -> Result<Feeding<I, F, T>>
    where
        I::Item: Send + 'static,
        T: Send + 'static,
        F: Fn(I::Item) -> T + Send + Sync + 'static,
    {
        let Self { inputs, threads, depth } = self;
        let depth = depth.unwrap_or(threads.saturating_mul(2));
        if threads == 0 {
            return Ok(Feeding::new(inputs, f, None, 0));
        }
        let name = "the number of batches that are made ahead";
        Error::check_setting(depth > 0, name, 0.0, "at least 1")?;
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|thread| format!("feed-{thread}"))
            .build()
            .map_err(|cause| Error::Threads { threads, cause })?;
        Ok(Feeding::new(inputs, f, Some(pool), depth))
    }
}
