//! Batches that are made ahead of the steps that take them.

mod ahead;

use rayon::ThreadPoolBuilder;

pub use self::ahead::Feeding;
use crate::error::{Error, Result};

/// Makes batches on background threads while steps are taken: the workers of PyTorch's
/// `DataLoader`, as threads.
///
/// `batches` says what is to be made, such as the steps of a sampler, and
/// [`collate`](Feed::collate) how. What comes out is what `batches.map(f)` gives, in its order,
/// whatever the number of threads.
///
/// # Determinism
///
/// As that of `batches` and of the function. Random numbers in the function have to come from what
/// it is given, such as the index of the step, and not from a generator that threads share.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use dist_train::feed;
///
/// let texts = ["to be", "or not", "to be"];
/// let indices = [2, 0, 1]; // of a sampler
/// let bytes = move |index: usize| Tensor::new(texts[index].as_bytes(), &Device::Cpu);
/// for (batch, index) in feed(indices).threads(2).collate(bytes)?.zip(indices) {
///     assert_eq!(batch?.to_vec1::<u8>()?, texts[index].as_bytes());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "DataLoader")]
pub fn feed<I: IntoIterator>(batches: I) -> Feed<I::IntoIter> {
    Feed { batches: batches.into_iter(), threads: 1, depth: None }
}

/// What [`feed`] is to do: on how many threads, and how far ahead.
#[derive(Clone, Debug)]
#[must_use = "nothing is made before `collate`"]
pub struct Feed<I> {
    batches: I,
    threads: usize,
    depth: Option<usize>,
}

impl<I: Iterator> Feed<I> {
    /// Sets the number of threads; 1 by default, and with 0 each batch is made by the thread that
    /// asks for it, when it does. (`num_workers` of PyTorch's `DataLoader`.)
    ///
    /// They share the processor with the slots of a mesh: what
    /// [`init_threads`](pmap_mesh::init_threads) gives to the slots is not theirs.
    pub fn threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    /// Sets how many batches may be ready or in the making at a time; two for each thread by
    /// default. Memory for one more is needed, which the step has. (PyTorch's `prefetch_factor`
    /// times `num_workers`.)
    pub fn depth(self, batches: usize) -> Self {
        Self { depth: Some(batches), ..self }
    }

    /// Starts the threads; `f` makes a batch from what the iterator yields.
    ///
    /// The iterator itself is advanced by the thread that takes the batches, so it may borrow.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if nothing may be ahead on threads, [`Error::Threads`] if the system does
    /// not start them.
    pub fn collate<T, F>(self, f: F) -> Result<Feeding<I, F, T>>
    where
        I::Item: Send + 'static,
        T: Send + 'static,
        F: Fn(I::Item) -> T + Send + Sync + 'static,
    {
        let Self { batches, threads, depth } = self;
        let depth = depth.unwrap_or(threads.saturating_mul(2));
        if threads == 0 {
            return Ok(Feeding::new(batches, f, None, 0));
        }
        let name = "the number of batches that are made ahead";
        Error::check_setting(depth > 0, name, 0.0, "at least 1")?;
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|thread| format!("feed-{thread}"))
            .build()
            .map_err(|cause| Error::Threads { threads, cause })?;
        Ok(Feeding::new(batches, f, Some(pool), depth))
    }
}
