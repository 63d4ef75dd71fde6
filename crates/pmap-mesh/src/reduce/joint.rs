//! Shared work: ranks that wait for a result compute its next chunk.
//!
//! Each member begins with a share of its own, so that it works on what its caches may still hold,
//! and then helps the others with theirs. A member that comes late finds its share done, and
//! members that wait for several results in different orders never wait for each other: whatever
//! has been taken is being worked on.

use std::{
    fmt,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use candle_core::{Error, Tensor};

use crate::reduce::parts::balanced;

/// The most that is made at a time: some microseconds of work, beside which taking the next piece
/// does not count.
const LARGEST_PIECE_BYTES: usize = 64 << 10;
/// The least: a piece of less would be done before another member has taken the next.
const SMALLEST_PIECE_BYTES: usize = 8 << 10;
/// How many pieces there are of a small result: one for each of a few members, of which one that
/// comes early takes a second.
const PIECES: usize = 4;

/// How many items of this many bytes each make a piece of a result of `n_items`.
pub(super) fn piece_items(n_items: usize, item_bytes: usize) -> usize {
    let bytes = (n_items * item_bytes).div_ceil(PIECES);
    bytes.clamp(SMALLEST_PIECE_BYTES, LARGEST_PIECE_BYTES) / item_bytes
}

/// Fills a piece of one result; returns the result if that was the last one.
type Fill = Box<dyn Fn(usize) -> candle_core::Result<Option<Tensor>> + Send + Sync>;

/// One result, to be made in pieces.
pub(crate) struct Output {
    n_pieces: usize,
    fill: Fill,
}

impl Output {
    /// A result whose pieces, at least one, are filled by `fill`, each once and in any order.
    pub(crate) fn new(
        n_pieces: usize,
        fill: impl Fn(usize) -> candle_core::Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Self {
        Self { n_pieces, fill: Box::new(fill) }
    }
}

/// Several results that are made together.
pub(crate) struct SharedWork {
    outputs: Vec<Output>,
    /// For each output the number of its first piece, counted over all outputs.
    first_pieces: Vec<usize>,
    /// For each member its share of the pieces.
    shares: Vec<Share>,
    results: Vec<OnceLock<Tensor>>,
    /// How many results are missing.
    missing: AtomicUsize,
    /// Set when all results are there, or the first of them has failed.
    outcome: OnceLock<Result<(), String>>,
}

/// Pieces that follow each other.
struct Share {
    /// The next piece that nobody has taken. Only who gets a number counts: what the pieces are was
    /// written before anybody could see this.
    next: AtomicUsize,
    end: usize,
}

impl SharedWork {
    /// The work of so many members.
    pub(crate) fn new(outputs: Vec<Output>, members: usize) -> Self {
        let mut n_pieces = 0;
        let first_piece = |output: &Output| {
            let first = n_pieces;
            n_pieces += output.n_pieces;
            first
        };
        let first_pieces = outputs.iter().map(first_piece).collect();
        let share = |member| {
            let pieces = balanced(n_pieces, member, members);
            Share { next: AtomicUsize::new(pieces.start), end: pieces.end }
        };
        let shares = (0..members).map(share).collect();
        let outcome = if outputs.is_empty() { OnceLock::from(Ok(())) } else { OnceLock::new() };
        Self {
            first_pieces,
            shares,
            results: outputs.iter().map(|_| OnceLock::new()).collect(),
            missing: AtomicUsize::new(outputs.len()),
            outcome,
            outputs,
        }
    }

    /// Takes pieces until there are none left, those of this member's share first; returns whether
    /// that has finished the work, and those that wait for it are to be woken.
    pub(crate) fn help(&self, member: usize) -> bool {
        let mut has_finished = false;
        let (before, from) = self.shares.split_at(member);
        for share in from.iter().chain(before) {
            while let Some(piece) = share.take().filter(|_| !self.is_finished()) {
                // A panic must not leave the others waiting for the piece.
                let guard = PoisonOnPanic(self);
                has_finished |= self.make(piece);
                std::mem::forget(guard);
            }
        }
        has_finished
    }

    /// Makes one piece; returns whether the work is finished by it.
    fn make(&self, piece: usize) -> bool {
        let output = self.first_pieces.partition_point(|&first| first <= piece) - 1;
        match (self.outputs[output].fill)(piece - self.first_pieces[output]) {
            Ok(None) => false,
            Ok(Some(result)) => {
                // The one thread that filled the last piece.
                drop(self.results[output].set(result));
                // Release the result to who finds that none is missing, acquire those of others.
                self.missing.fetch_sub(1, Ordering::AcqRel) == 1 && self.outcome.set(Ok(())).is_ok()
            }
            Err(error) => self.outcome.set(Err(error.to_string())).is_ok(),
        }
    }

    /// Whether all results are there, or will not come.
    pub(crate) fn is_finished(&self) -> bool {
        self.outcome.get().is_some()
    }

    /// A result of finished work.
    ///
    /// # Errors
    ///
    /// Why the work has failed.
    pub(crate) fn result(&self, output: usize) -> candle_core::Result<Tensor> {
        if let Some(Err(why)) = self.outcome.get() {
            return Err(Error::msg(why));
        }
        self.results[output].get().cloned().ok_or_else(|| Error::msg("the result is not finished"))
    }
}

impl Share {
    fn take(&self) -> Option<usize> {
        let piece = self.next.fetch_add(1, Ordering::Relaxed);
        (piece < self.end).then_some(piece)
    }
}

/// Finishes the work for all with an error, unless it is forgotten.
struct PoisonOnPanic<'a>(&'a SharedWork);

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        // Another failure may have been the first.
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

    /// An output that counts how often each piece is filled.
    fn counting(counts: &Arc<Vec<AtomicUsize>>, items: usize) -> Output {
        let counts = Arc::clone(counts);
        let left = AtomicUsize::new(counts.len());
        Output::new(counts.len(), move |piece| {
            counts[piece].fetch_add(1, Ordering::Relaxed);
            Ok((left.fetch_sub(1, Ordering::AcqRel) == 1).then(|| zeros(items)))
        })
    }

    #[test]
    fn every_piece_is_made_once_however_many_help() {
        for helpers in 1..5 {
            let counts: Vec<Arc<Vec<AtomicUsize>>> = [3, 1, 40]
                .map(|pieces| Arc::new((0..pieces).map(|_| AtomicUsize::new(0)).collect()))
                .to_vec();
            let outputs = counts.iter().enumerate().map(|(n, counts)| counting(counts, n + 1));
            let work = SharedWork::new(outputs.collect(), helpers);
            let finishers: Vec<bool> = thread::scope(|scope| {
                let work = &work;
                let helpers: Vec<_> =
                    (0..helpers).map(|member| scope.spawn(move || work.help(member))).collect();
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
    fn nothing_to_do_is_finished_at_once() {
        assert!(SharedWork::new(Vec::new(), 2).is_finished());
    }

    #[test]
    fn a_piece_that_fails_or_panics_finishes_the_work_for_all() {
        let fails = SharedWork::new(vec![Output::new(2, |_| bail!("no memory"))], 2);
        assert!(fails.help(1) && fails.is_finished() && !fails.help(0));
        assert!(fails.result(0).unwrap_err().to_string().starts_with("no memory"));

        let panics = SharedWork::new(vec![Output::new(2, |_| panic!("broken"))], 2);
        assert!(catch_unwind(AssertUnwindSafe(|| panics.help(0))).is_err());
        assert!(panics.is_finished() && panics.result(0).is_err());
    }
}
