//! Shared work: the members of a group that wait for a result compute its chunks.
//!
//! Each member starts with a separate share of the chunks, which its caches may still hold, and
//! then computes chunks of the other members' shares. The share of a late member may be finished
//! when the member arrives. Members that wait for several results in different orders never block
//! each other, since every chunk that was taken is being computed.

use std::{
    fmt,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use candle_core::{Error, Tensor};

use crate::reduce::parts::balanced;

/// The largest chunk: some microseconds of work, compared to which taking the next chunk is cheap.
const LARGEST_CHUNK_BYTES: usize = 64 << 10;
/// The smallest chunk: a member would finish a smaller one before another member could take the
/// next chunk.
const SMALLEST_CHUNK_BYTES: usize = 8 << 10;
/// The number of chunks of a small result: enough that each of a few members gets a chunk, and a
/// member that arrives early gets a second one.
const N_CHUNKS: usize = 4;

/// Returns the number of items per chunk of a result, given the bytes of an item.
pub(super) fn chunk_items(n_items: usize, item_bytes: usize) -> usize {
    let bytes = (n_items * item_bytes).div_ceil(N_CHUNKS);
    bytes.clamp(SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES) / item_bytes
}

/// Computes a chunk of one result. The call that completes the last unfinished chunk returns the
/// result; the other calls return `None`.
type FillChunk = Box<dyn Fn(usize) -> candle_core::Result<Option<Tensor>> + Send + Sync>;

/// One result that is computed in chunks.
pub(crate) struct SharedOutput {
    n_chunks: usize,
    fill: FillChunk,
}

impl SharedOutput {
    /// Describes a result of at least one chunk. `fill` computes a chunk, given its index; it is
    /// called once for each chunk, in any order, and returns the result when all chunks are
    /// finished.
    pub(crate) fn new(
        n_chunks: usize,
        fill: impl Fn(usize) -> candle_core::Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Self {
        Self { n_chunks, fill: Box::new(fill) }
    }
}

/// Several results that the members of a group compute together.
pub(crate) struct SharedWork {
    outputs: Vec<SharedOutput>,
    /// The number of the first chunk of each output, counted over all outputs.
    first_chunks: Vec<usize>,
    /// The share of each member.
    shares: Vec<ChunkShare>,
    results: Vec<OnceLock<Tensor>>,
    /// The number of results that do not exist yet.
    n_missing: AtomicUsize,
    /// Set when all results exist, or when the first failure occurs.
    outcome: OnceLock<Result<(), String>>,
}

/// A range of consecutive chunks.
struct ChunkShare {
    /// The next free chunk. `Relaxed` suffices for this counter, which only assigns chunks: their
    /// inputs were published when the exchange completed.
    next: AtomicUsize,
    end: usize,
}

impl SharedWork {
    /// Divides the outputs into chunks for `members` members.
    pub(crate) fn new(outputs: Vec<SharedOutput>, members: usize) -> Self {
        let mut n_chunks = 0;
        let mut first_chunks = Vec::with_capacity(outputs.len());
        for output in &outputs {
            first_chunks.push(n_chunks);
            n_chunks += output.n_chunks;
        }
        let shares = (0..members).map(|member| {
            let chunks = balanced(n_chunks, member, members);
            ChunkShare { next: AtomicUsize::new(chunks.start), end: chunks.end }
        });
        let outcome = if outputs.is_empty() { OnceLock::from(Ok(())) } else { OnceLock::new() };
        Self {
            first_chunks,
            shares: shares.collect(),
            results: outputs.iter().map(|_| OnceLock::new()).collect(),
            n_missing: AtomicUsize::new(outputs.len()),
            outcome,
            outputs,
        }
    }

    /// Computes chunks until all are taken, starting with this member's share. Returns true if this
    /// call finished the work; the caller must then wake the waiting members.
    pub(crate) fn run_chunks(&self, member: usize) -> bool {
        let mut has_finished = false;
        let (earlier, own_and_later) = self.shares.split_at(member);
        for share in own_and_later.iter().chain(earlier) {
            while let Some(chunk) = share.take()
                && !self.is_finished()
            {
                // If a chunk panics, the other members must not wait for it.
                let guard = PoisonOnPanic(self);
                has_finished |= self.run_chunk(chunk);
                std::mem::forget(guard);
            }
        }
        has_finished
    }

    /// Computes one chunk; returns true if this call finished the work.
    fn run_chunk(&self, chunk: usize) -> bool {
        let output = self.first_chunks.partition_point(|&first| first <= chunk) - 1;
        match (self.outputs[output].fill)(chunk - self.first_chunks[output]) {
            Ok(None) => false,
            Ok(Some(result)) => {
                // `set` cannot fail: only the thread that filled the output's last chunk gets here.
                drop(self.results[output].set(result));
                // Release this result to the thread that lowers `n_missing` to 0, and acquire the
                // results of the other threads.
                let is_last = self.n_missing.fetch_sub(1, Ordering::AcqRel) == 1;
                is_last && self.outcome.set(Ok(())).is_ok()
            }
            Err(error) => self.outcome.set(Err(error.to_string())).is_ok(),
        }
    }

    /// Returns true if all results exist or the work has failed.
    pub(crate) fn is_finished(&self) -> bool {
        self.outcome.get().is_some()
    }

    /// Returns a result of finished work.
    ///
    /// # Errors
    ///
    /// The reason why the work failed.
    pub(crate) fn result(&self, output: usize) -> candle_core::Result<Tensor> {
        if let Some(Err(reason)) = self.outcome.get() {
            return Err(Error::msg(reason));
        }
        self.results[output].get().cloned().ok_or_else(|| Error::msg("the result is not finished"))
    }
}

impl ChunkShare {
    /// Takes the next chunk, if any is free.
    fn take(&self) -> Option<usize> {
        let chunk = self.next.fetch_add(1, Ordering::Relaxed);
        (chunk < self.end).then_some(chunk)
    }
}

/// Fails the work for all members when it is dropped; `mem::forget` prevents this.
struct PoisonOnPanic<'a>(&'a SharedWork);

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        // `set` fails if another outcome was recorded first.
        drop(
            self.0.outcome.set(Err("a replica panicked while it made a part of the result".into())),
        );
    }
}

impl fmt::Debug for SharedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedWork")
            .field("n_outputs", &self.outputs.len())
            .field("outcome", &self.outcome)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::Arc,
        thread,
    };

    use candle_core::{DType, Device, bail};

    use super::*;

    fn zeros(items: usize) -> Tensor {
        Tensor::zeros(items, DType::F32, &Device::Cpu).unwrap()
    }

    /// Returns an output that counts the calls for each chunk.
    fn counting(counts: &Arc<Vec<AtomicUsize>>, items: usize) -> SharedOutput {
        let counts = Arc::clone(counts);
        let left = AtomicUsize::new(counts.len());
        SharedOutput::new(counts.len(), move |chunk| {
            counts[chunk].fetch_add(1, Ordering::Relaxed);
            Ok((left.fetch_sub(1, Ordering::AcqRel) == 1).then(|| zeros(items)))
        })
    }

    #[test]
    fn every_chunk_runs_once() {
        for helpers in 1..5 {
            let counts: Vec<Arc<Vec<AtomicUsize>>> = [3, 1, 40]
                .map(|chunks| Arc::new((0..chunks).map(|_| AtomicUsize::new(0)).collect()))
                .to_vec();
            let outputs = counts.iter().enumerate().map(|(n, counts)| counting(counts, n + 1));
            let work = SharedWork::new(outputs.collect(), helpers);
            let finishers: Vec<bool> = thread::scope(|scope| {
                let work = &work;
                let helpers: Vec<_> = (0..helpers)
                    .map(|member| scope.spawn(move || work.run_chunks(member)))
                    .collect();
                helpers.into_iter().map(|helper| helper.join().unwrap()).collect()
            });
            assert_eq!(finishers.iter().filter(|&&finished| finished).count(), 1);
            let counts = counts.iter().flat_map(|counts| counts.iter());
            assert!(counts.into_iter().all(|count| count.load(Ordering::Relaxed) == 1));
            for (n, items) in [1, 2, 3].into_iter().enumerate() {
                assert_eq!(work.result(n).unwrap().dims(), [items]);
            }
        }
    }

    #[test]
    fn empty_work_is_finished() {
        assert!(SharedWork::new(Vec::new(), 2).is_finished());
    }

    #[test]
    fn failed_chunk_fails_the_work() {
        let fails = SharedWork::new(vec![SharedOutput::new(2, |_| bail!("no memory"))], 2);
        assert!(fails.run_chunks(1) && fails.is_finished() && !fails.run_chunks(0));
        assert!(fails.result(0).unwrap_err().to_string().starts_with("no memory"));

        let panics = SharedWork::new(vec![SharedOutput::new(2, |_| panic!("broken"))], 2);
        assert!(catch_unwind(AssertUnwindSafe(|| panics.run_chunks(0))).is_err());
        assert!(panics.is_finished() && panics.result(0).is_err());
    }
}
