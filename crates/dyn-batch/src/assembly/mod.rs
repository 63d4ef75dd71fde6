//! Sequences on their way into batches: what each strategy keeps open.

pub(crate) mod whole_set;
mod window;

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
};

use self::{
    whole_set::{Whole, of_whole_set},
    window::Window,
};
use crate::{
    batch::{Batch, Sequence},
    config::{DynamicBatchStrategy, Packing},
    error::Result,
    limits::Limits,
    pack::OpenRows,
    sort::histogram::Histogram,
};

/// What a strategy keeps until it is a batch.
#[derive(Clone, Debug)]
pub(crate) enum Assembly {
    /// The open batches by bucket; strategies without buckets use one.
    Open(BTreeMap<u64, Open>),
    Window(Window),
    Rows(OpenRows),
    Whole(Vec<Sequence>, Whole),
}

impl Assembly {
    pub(crate) fn new(limits: &Limits) -> Self {
        let strategy = &limits.config().strategy;
        if let Some(whole) = of_whole_set(strategy) {
            return Self::Whole(Vec::new(), whole);
        }
        match *strategy {
            DynamicBatchStrategy::Sorted { window: Some(window), cut } => {
                Self::Window(Window::new(window, cut))
            }
            DynamicBatchStrategy::Pack(Packing::InOrder { open_rows }) => {
                Self::Rows(OpenRows::new(limits.empty_row(), open_rows))
            }
            _ => Self::Open(BTreeMap::new()),
        }
    }

    /// Adds an admitted sequence; what is a batch with it goes to `ready`.
    pub(crate) fn push(
        &mut self,
        sequence: Sequence,
        limits: &Limits,
        ready: &mut VecDeque<Batch>,
    ) {
        match self {
            Self::Open(open) => open
                .entry(limits.bucket(sequence.length))
                .or_default()
                .push(sequence, limits, ready),
            Self::Window(window) => ready.extend(window.push(sequence, limits)),
            Self::Rows(rows) => {
                rows.push(sequence, |row| ready.push_back(Batch::gather(row.into_iter(), limits)))
            }
            Self::Whole(sequences, _) => sequences.push(sequence),
        }
    }

    /// Makes batches of what is left; returns how many sequences are dropped.
    pub(crate) fn finish(&mut self, limits: &Limits, ready: &mut VecDeque<Batch>) -> Result<u64> {
        match self {
            Self::Open(open) => {
                Ok(mem::take(open).into_values().map(|open| open.finish(limits, ready)).sum())
            }
            Self::Window(window) => {
                finish_whole(&window.take(), Whole::Sorted(window.cut()), limits, ready)
            }
            Self::Rows(rows) => {
                rows.finish(|row| ready.push_back(Batch::gather(row.into_iter(), limits)));
                Ok(0)
            }
            Self::Whole(sequences, whole) => {
                finish_whole(&mem::take(sequences), *whole, limits, ready)
            }
        }
    }
}

fn finish_whole(
    sequences: &[Sequence],
    whole: Whole,
    limits: &Limits,
    ready: &mut VecDeque<Batch>,
) -> Result<u64> {
    let lengths = || sequences.iter().map(|sequence| sequence.length);
    let arrangement =
        whole.arrange(&Histogram::new(lengths()), (0..).zip(lengths()), limits, None)?;
    ready.extend(arrangement.batches.iter().map(|batch| {
        let places = &arrangement.names[batch.places.start as usize..batch.places.end as usize];
        Batch::gather(places.iter().map(|&place| sequences[place as usize]), limits)
    }));
    Ok(arrangement.dropped)
}

/// A batch that still grows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Open {
    sequences: Vec<Sequence>,
    longest: u64,
    /// The most sequences it may hold; counts only if there are some.
    max_rows: u64,
}

impl Open {
    /// Adds a sequence; a batch that is full with it goes to `ready`, at most two.
    fn push(&mut self, sequence: Sequence, limits: &Limits, ready: &mut VecDeque<Batch>) {
        if self.sequences.is_empty() || sequence.length > self.longest {
            self.lengthen(sequence.length, limits);
        }
        self.sequences.push(sequence);
        while let Some(size) = limits.full(self.sequences.len(), self.max_rows) {
            ready.push_back(self.close(size, limits));
        }
    }

    fn lengthen(&mut self, longest: u64, limits: &Limits) {
        self.longest = longest;
        self.max_rows = limits.max_rows(limits.padded_length(longest));
    }

    /// Takes out the first `size` sequences; the others stay and open the next batch.
    fn close(&mut self, size: usize, limits: &Limits) -> Batch {
        let batch = Batch::gather(self.sequences.drain(..size), limits);
        self.lengthen(
            self.sequences.iter().map(|sequence| sequence.length).max().unwrap_or(0),
            limits,
        );
        batch
    }

    /// Makes the last batches; returns how many sequences are dropped.
    fn finish(mut self, limits: &Limits, ready: &mut VecDeque<Batch>) -> u64 {
        let (whole, surplus) = limits.last(self.sequences.len());
        for size in [whole, surplus].into_iter().filter(|&size| size > 0) {
            ready.push_back(self.close(size, limits));
        }
        self.sequences.len() as u64
    }
}
