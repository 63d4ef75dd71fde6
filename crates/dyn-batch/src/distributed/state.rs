//! Where a rank stands in its batches, so that it can resume there.

use std::fmt;

use core_types::{Epoch, Fingerprint};

use crate::{
    distributed::config::{DistributedConfig, StepLayout},
    lengths::SequenceLengths,
    sampler::plan::BatchPlan,
};

/// How many of its steps a rank has taken; serializable with feature `serde`.
///
/// A state is that of certain batches: sequences, order, configurations, world size and epoch.
/// [`resume`](crate::DistributedBatchSampler::resume) refuses it for any others.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct BatchState {
    /// The version of this form.
    pub format_version: u32,
    /// The epoch.
    pub epoch: Epoch,
    /// How many of its steps have been taken.
    pub step: u64,
    /// How many steps it has.
    pub n_steps: u64,
    /// How many ranks take part.
    pub world_size: u64,
    /// A hash that identifies the batches and their order.
    pub fingerprint: u64,
    /// Where sorted sequences are cut: a run-length list of batch size and count, the shortest
    /// sequences first. Empty for other strategies.
    pub cut: Vec<(u32, u32)>,
}

impl fmt::Display for BatchState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format_version, epoch, step, n_steps, world_size, fingerprint, .. } = self;
        write!(f, "step {step} of {n_steps} in epoch {} over {world_size} ranks", epoch.as_u64())?;
        write!(f, " (format {format_version}, batches {fingerprint:016x})")
    }
}

/// A hash of the batches in the order of their steps, and of what decides which rank takes which.
///
/// Every index counts: two orders may cut their batches at the same places, and begin them with the
/// same sequences.
pub(super) fn fingerprint<L: SequenceLengths>(
    plan: &BatchPlan<'_, L>,
    batches: &[u32],
    config: &DistributedConfig,
) -> u64 {
    let mut fingerprint = Fingerprint::new();
    match config.shuffle {
        Some(seed) => fingerprint.write_u64(1).write_u64(seed.as_u64()),
        None => fingerprint.write_u64(0),
    };
    fingerprint.write_u64(match config.layout {
        StepLayout::Grouped => 0,
        StepLayout::Dealt => 1,
    });
    let cost = config.cost;
    fingerprint.extend([cost.per_sequence, cost.per_token, cost.per_token_squared]);
    for &batch in batches {
        let planned = plan.planned(batch as usize);
        fingerprint.extend([planned.len() as u64, planned.padded_length, planned.real_tokens]);
        fingerprint.extend(plan.indices(batch as usize).iter().copied().map(u64::from));
    }
    fingerprint.finish()
}
