//! The batcher: sequences in, batches out, in one pass.

use std::{
    collections::{BTreeMap, VecDeque},
    iter::FusedIterator,
    mem,
};

use crate::{Batch, BatchConfig, Error, PaddingReport, Result, Sequence, rules::Rules};

/// An iterator of batches over an iterator of sequences.
///
/// It takes no more sequences than the next batch needs, so an endless stream is fine, and it holds the open batches
/// only: one, or one for each bucket. The stream may fail with an error of its own. The first error, of the stream or
/// of a batch, ends the iteration, and the sequences of open batches are lost with it.
///
/// # Determinism
///
/// The batches depend on the sequences, their order and the configuration alone.
///
/// # Examples
///
/// ```
/// use dyn_batch::{BatchConfig, Batches, DynamicBatchStrategy, Error, Sequence};
///
/// let endless = (0..).map(|index| Ok::<_, Error>(Sequence { index, length: index % 100 }));
/// let config = BatchConfig::default().with_strategy(DynamicBatchStrategy::Dynamic).with_max_tokens(400);
/// let mut batches = Batches::new(endless, config)?;
///
/// let sizes = batches.by_ref().take(4).map(|batch| Ok(batch?.len())).collect::<Result<Vec<_>, Error>>()?;
/// assert_eq!(sizes, [20, 12, 9, 8]);
/// assert_eq!(batches.report().sequences, 49);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct Batches<I> {
    /// `None` from the end or the first error on.
    sequences: Option<I>,
    rules: Rules,
    /// The open batches by bucket; strategies without buckets use one.
    open: BTreeMap<u64, Open>,
    /// Full batches: up to two after a sequence, all leftovers at the end.
    ready: VecDeque<Batch>,
    report: PaddingReport,
}

impl<I: Iterator> Batches<I> {
    /// Returns the batches of a stream of sequences.
    ///
    /// # Errors
    ///
    /// [`Error::Zero`], [`Error::NoLimit`], [`Error::NoTokenBudget`], [`Error::TokenBudgetOverflow`] or
    /// [`Error::MultipleOverLimit`] if the configuration contradicts itself.
    pub fn new(sequences: impl IntoIterator<IntoIter = I>, config: BatchConfig) -> Result<Self> {
        Rules::new(config).map(|rules| Self::with_rules(sequences.into_iter(), rules))
    }

    pub(crate) fn with_rules(sequences: I, rules: Rules) -> Self {
        let report = PaddingReport::default();
        Self { sequences: Some(sequences), rules, open: BTreeMap::new(), ready: VecDeque::new(), report }
    }

    /// What the batches so far cost, and how many sequences made it into none.
    pub fn report(&self) -> &PaddingReport {
        &self.report
    }

    fn place(&mut self, sequence: Sequence) -> Result<()> {
        let Some(sequence) = self.rules.admit(sequence, &mut self.report)? else { return Ok(()) };
        let open = self.open.entry(self.rules.bucket(sequence.length)).or_default();
        open.push(sequence);
        while let Some(size) = self.rules.full(open.sequences.len(), open.padded_length) {
            self.ready.push_back(open.close(size));
        }
        Ok(())
    }

    fn finish(&mut self) {
        self.sequences = None;
        for mut open in mem::take(&mut self.open).into_values() {
            let (whole, surplus) = self.rules.last(open.sequences.len());
            for size in [whole, surplus].into_iter().filter(|&size| size > 0) {
                self.ready.push_back(open.close(size));
            }
            self.report.dropped += open.sequences.len() as u64;
        }
    }

    fn abandon(&mut self) {
        self.sequences = None;
        self.open.clear();
    }
}

impl<I, E> Iterator for Batches<I>
where
    I: Iterator<Item = Result<Sequence, E>>,
    E: From<Error>,
{
    type Item = Result<Batch, E>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.ready.is_empty() {
            match self.sequences.as_mut()?.next() {
                Some(sequence) => {
                    if let Err(error) = sequence.and_then(|sequence| Ok(self.place(sequence)?)) {
                        self.abandon();
                        return Some(Err(error));
                    }
                }
                None => self.finish(),
            }
        }
        let batch = self.ready.pop_front()?;
        self.report.add(&batch);
        Some(Ok(batch))
    }
}

impl<I, E> FusedIterator for Batches<I>
where
    I: Iterator<Item = Result<Sequence, E>>,
    E: From<Error>,
{
}

/// A batch that still grows.
#[derive(Clone, Debug, Default)]
struct Open {
    sequences: Vec<Sequence>,
    padded_length: u64,
}

impl Open {
    fn push(&mut self, sequence: Sequence) {
        self.padded_length = self.padded_length.max(sequence.length);
        self.sequences.push(sequence);
    }

    /// Takes out the first `size` sequences; the others stay and open the next batch.
    fn close(&mut self, size: usize) -> Batch {
        let batch = Batch::gather(self.sequences.drain(..size));
        self.padded_length = self.sequences.iter().map(|sequence| sequence.length).max().unwrap_or(0);
        batch
    }
}
