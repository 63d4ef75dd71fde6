//! Sequences on their way into batches: what each strategy keeps open.

mod open_batch;
pub(crate) mod sorted_set;
mod window;

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
};

use self::{open_batch::OpenBatch, sorted_set::WholeSetStrategy, window::Window};
use crate::{
    batch::{Batch, Sequence},
    config::{DynamicBatchStrategy, Packing},
    error::Result,
    lengths::histogram::Histogram,
    limits::Limits,
    pack::OpenRows,
};

/// What a strategy keeps until it is a batch.
#[derive(Clone, Debug)]
pub(crate) enum BatchBuilder {
    /// The open batches by bucket; strategies without buckets use one.
    Open(BTreeMap<u64, OpenBatch>),
    Window(Window),
    Rows(OpenRows),
    Whole(Vec<Sequence>, WholeSetStrategy),
}

impl BatchBuilder {
    pub(crate) fn new(limits: &Limits) -> Self {
        match limits.config().strategy {
            DynamicBatchStrategy::PadToMax
            | DynamicBatchStrategy::Bucket(_)
            | DynamicBatchStrategy::Dynamic => Self::Open(BTreeMap::new()),
            DynamicBatchStrategy::Sorted { window: Some(window), cut } => {
                Self::Window(Window::new(window, cut))
            }
            DynamicBatchStrategy::Sorted { window: None, cut } => {
                Self::Whole(Vec::new(), WholeSetStrategy::Sorted(cut))
            }
            DynamicBatchStrategy::Pack(Packing::BestFit) => {
                Self::Whole(Vec::new(), WholeSetStrategy::BestFit)
            }
            DynamicBatchStrategy::Pack(Packing::MinimumSlack) => {
                Self::Whole(Vec::new(), WholeSetStrategy::MinimumSlack)
            }
            DynamicBatchStrategy::Pack(Packing::InOrder { open_rows }) => {
                Self::Rows(OpenRows::new(limits.empty_row(), open_rows))
            }
        }
    }

    /// How the strategy arranges all sequences at once; `None` if it takes them as they come.
    pub(crate) fn whole(limits: &Limits) -> Option<WholeSetStrategy> {
        match Self::new(limits) {
            Self::Whole(_, whole) => Some(whole),
            Self::Open(_) | Self::Window(_) | Self::Rows(_) => None,
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
            Self::Open(open) => {
                open.entry(limits.bucket(sequence.length))
                    .or_default()
                    .push(sequence, limits, ready);
            }
            Self::Window(window) => ready.extend(window.push(sequence, limits)),
            Self::Rows(rows) => {
                rows.push(sequence, |row| ready.push_back(limits.batch(row.into_iter())));
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
                finish_whole(&window.take(), WholeSetStrategy::Sorted(window.cut()), limits, ready)
            }
            Self::Rows(rows) => {
                rows.finish(|row| ready.push_back(limits.batch(row.into_iter())));
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
    whole: WholeSetStrategy,
    limits: &Limits,
    ready: &mut VecDeque<Batch>,
) -> Result<u64> {
    let lengths = || sequences.iter().map(|sequence| sequence.length);
    let histogram = Histogram::new(lengths());
    // Sequences go by their positions here.
    let arrangement = whole.arrange(&histogram, (0..).zip(lengths()), limits, None)?;
    for batch in &arrangement.batches {
        let positions = &arrangement.ids[batch.range.start as usize..batch.range.end as usize];
        let sequences = positions.iter().map(|&position| sequences[position as usize]);
        ready.push_back(limits.batch(sequences));
    }
    Ok(arrangement.dropped)
}
