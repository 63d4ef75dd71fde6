//! Builders of batches: the open batches of each strategy.

mod open_batch;
pub(crate) mod whole_set;
mod window;

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
};

use self::{open_batch::OpenBatch, whole_set::WholeSetStrategy, window::SortWindow};
use crate::{
    batch::{Batch, Sequence},
    config::{DynamicBatchStrategy, Packing},
    error::Result,
    lengths::histogram::LengthHistogram,
    limits::BatchLimits,
    pack::OpenRows,
};

/// The pending sequences of a strategy.
#[derive(Clone, Debug)]
pub(crate) enum BatchBuilder {
    /// Open batches by bucket; strategies without buckets use one.
    Open(BTreeMap<u64, OpenBatch>),
    Window(SortWindow),
    Rows(OpenRows),
    Whole(Vec<Sequence>, WholeSetStrategy),
}

impl BatchBuilder {
    /// Creates an empty builder for the strategy.
    pub(crate) fn new(limits: &BatchLimits) -> Self {
        match limits.config().strategy {
            DynamicBatchStrategy::PadToMax
            | DynamicBatchStrategy::Bucket(_)
            | DynamicBatchStrategy::Dynamic => Self::Open(BTreeMap::new()),
            DynamicBatchStrategy::Sorted { window: Some(window), cut } => {
                Self::Window(SortWindow::new(window, cut))
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

    /// Returns the strategy if it arranges all sequences at once.
    pub(crate) fn whole_set_strategy(limits: &BatchLimits) -> Option<WholeSetStrategy> {
        match Self::new(limits) {
            Self::Whole(_, strategy) => Some(strategy),
            Self::Open(_) | Self::Window(_) | Self::Rows(_) => None,
        }
    }

    /// Adds an admitted sequence, moving full batches to `ready`.
    pub(crate) fn push(
        &mut self,
        sequence: Sequence,
        limits: &BatchLimits,
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
                let item = limits.row_item(sequence.length);
                rows.push(sequence, item, |row| ready.push_back(limits.batch(row.into_iter())));
            }
            Self::Whole(sequences, _) => sequences.push(sequence),
        }
    }

    /// Moves the last batches to `ready`, and returns the number of dropped sequences.
    pub(crate) fn finish(
        &mut self,
        limits: &BatchLimits,
        ready: &mut VecDeque<Batch>,
    ) -> Result<u64> {
        match self {
            Self::Open(open) => {
                Ok(mem::take(open).into_values().map(|batch| batch.finish(limits, ready)).sum())
            }
            Self::Window(window) => {
                finish_whole(&window.take(), WholeSetStrategy::Sorted(window.cut()), limits, ready)
            }
            Self::Rows(rows) => {
                rows.finish(|row| ready.push_back(limits.batch(row.into_iter())));
                Ok(0)
            }
            Self::Whole(sequences, strategy) => {
                finish_whole(&mem::take(sequences), *strategy, limits, ready)
            }
        }
    }
}

/// Arranges all `sequences` at once, and moves their batches to `ready`. Returns the number of
/// dropped sequences.
fn finish_whole(
    sequences: &[Sequence],
    strategy: WholeSetStrategy,
    limits: &BatchLimits,
    ready: &mut VecDeque<Batch>,
) -> Result<u64> {
    let lengths = || sequences.iter().map(|sequence| sequence.length);
    let histogram = LengthHistogram::new(lengths());
    // Here a sequence's number is its position in `sequences`.
    let arrangement = strategy.arrange(&histogram, (0..).zip(lengths()), limits, None)?;
    for batch in &arrangement.batches {
        let positions = &arrangement.ids[batch.range.start as usize..batch.range.end as usize];
        let batch_sequences = positions.iter().map(|&position| sequences[position as usize]);
        ready.push_back(limits.batch(batch_sequences));
    }
    Ok(arrangement.dropped)
}
