//! The position of a rank in its steps, for resuming.

use std::fmt;

use core_types::{Epoch, Fingerprint, WorldSize};

use crate::{
    distributed::config::{DistributedConfig, StepLayout},
    grid::{GridConfig, Synchronization},
    lengths::SequenceLengths,
    sampler::plan::BatchPlan,
};

/// The number of steps that a rank has taken; serializable with the feature `serde`.
///
/// A state belongs to certain batches: sequences, order, configurations and epoch.
/// [`resume`](crate::DistributedBatchSampler::resume) rejects the state for other batches. It accepts
/// another world size: the state then also has the steps of the earlier world.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct BatchState {
    /// Version of this format.
    pub format_version: u32,
    /// Epoch.
    pub epoch: Epoch,
    /// Number of steps that this world has taken.
    pub step: u64,
    /// Number of steps of this world in the epoch.
    pub n_steps: u64,
    /// Number of ranks.
    pub world_size: WorldSize,
    /// Hash of the batches and their order, also of earlier worlds.
    pub fingerprint: u64,
    /// Cuts of sorted sequences: a run-length list of batch size and count, the shortest sequences
    /// first. Empty for other strategies.
    pub cut: Vec<(u32, u32)>,
    /// Worlds that have taken the first steps of the epoch, in order; empty in most epochs.
    pub(super) earlier_worlds: Vec<EarlierWorld>,
}

impl BatchState {
    /// Limit on the earlier worlds of an epoch. Resuming plans the steps of each of them again,
    /// which takes some 0.1 s for ten million sequences.
    pub(super) const MAX_EARLIER_WORLDS: usize = 255;

    /// Returns the worlds that have read the epoch up to this state.
    pub(super) fn into_worlds(mut self) -> Vec<EarlierWorld> {
        let Self { world_size, step, .. } = self;
        self.earlier_worlds.push(EarlierWorld { world_size, step });
        self.earlier_worlds
    }
}

/// The part of an epoch that an earlier world has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub(super) struct EarlierWorld {
    pub(super) world_size: WorldSize,
    /// Number of steps that this world has taken.
    pub(super) step: u64,
}

impl fmt::Display for BatchState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format_version, epoch, step, n_steps, world_size, fingerprint, .. } = self;
        write!(f, "step {step} of {n_steps} in epoch {} over {world_size} ranks", epoch.as_u64())?;
        for EarlierWorld { world_size, step } in &self.earlier_worlds {
            write!(f, ", after {step} over {world_size}")?;
        }
        write!(f, " (format {format_version}, batches {fingerprint:016x})")
    }
}

/// Hashes the batches in the order of steps, the settings that assign them to ranks, and the
/// fingerprint of the earlier world, if there is one.
///
/// The hash includes every index, because two orders can have the same cuts and the same first
/// sequences.
pub(super) fn fingerprint<L: SequenceLengths>(
    plan: &BatchPlan<L>,
    batches: &[u32],
    config: &DistributedConfig,
    earlier: Option<u64>,
) -> u64 {
    let mut fingerprint = Fingerprint::new();
    fingerprint.extend(earlier);
    match config.shuffle {
        Some(seed) => fingerprint.write_u64(1).write_u64(seed.as_u64()),
        None => fingerprint.write_u64(0),
    };
    fingerprint.write_u64(match config.layout {
        StepLayout::Grouped => 0,
        StepLayout::Dealt => 1,
        StepLayout::Grid(grid) => grid_word(&grid),
    });
    // Without accumulation nothing is added, so that older states stay valid.
    fingerprint.extend(config.accumulation);
    let cost = config.cost;
    fingerprint.extend([cost.per_sequence, cost.per_token, cost.per_token_squared]);
    for &batch in batches {
        let planned = plan.planned_batch(batch as usize);
        fingerprint.extend([planned.len() as u64, planned.padded_length, planned.real_tokens]);
        fingerprint.extend(plan.indices(batch as usize).iter().copied().map(u64::from));
    }
    fingerprint.finish()
}

/// Returns the word for a grid, different from the other layouts.
fn grid_word(grid: &GridConfig) -> u64 {
    let synchronization = match grid.synchronization {
        Synchronization::MicroStep => 0,
        Synchronization::Step => 1,
    };
    let words = [2, synchronization].into_iter().chain(grid.global_batch_size);
    let mut fingerprint = Fingerprint::new();
    fingerprint.extend(words);
    fingerprint.finish()
}
