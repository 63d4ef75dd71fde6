//! The choices of a distributed batch sampler: what makes a step, and what fills the last one.

use core_types::Seed;

use crate::config::Cost;

/// What happens when the number of batches is no multiple of the world size.
///
/// Every rank must take the same number of steps: a rank with one batch less leaves the others
/// waiting in their collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
#[doc(alias = "drop_last")]
pub enum StepRemainder {
    /// The batches with the most padding are split in two: each sequence comes exactly once.
    #[default]
    Split,
    /// The last batches are left out; the report counts their sequences as dropped.
    Drop,
    /// The first batches come once more.
    Repeat,
}

/// What makes a step of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum StepLayout {
    /// As many batches as there are ranks, of similar cost. The least padding.
    #[default]
    Grouped,
    /// One batch that is as large as those of all ranks together, dealt out:
    /// as many sequences on each rank, and nearly the same cost. The
    /// least waiting, above all where attention skips the padding.
    ///
    /// Not for buckets and packed rows.
    Dealt,
}

/// The choices of a [`DistributedBatchSampler`](crate::DistributedBatchSampler).
///
/// # Examples
///
/// ```
/// use core_types::Seed;
/// use dyn_batch::{Cost, DistributedConfig, StepRemainder};
///
/// let config = DistributedConfig::default().with_shuffle(Seed::new(7)).with_cost(Cost::ATTENTION);
/// assert_eq!(config.remainder, StepRemainder::Split);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct DistributedConfig {
    /// Steps come in a random order, another one each epoch, if there is a seed; none by default.
    pub shuffle: Option<Seed>,
    /// What makes a step; [`StepLayout::Grouped`] by default.
    pub layout: StepLayout,
    /// What happens to batches that cannot fill up a step; [`StepRemainder::Split`] by default.
    pub remainder: StepRemainder,
    /// What to balance across the ranks within a step; the padded tokens by default.
    pub cost: Cost,
}

impl Default for DistributedConfig {
    fn default() -> Self {
        Self {
            shuffle: None,
            layout: StepLayout::default(),
            remainder: StepRemainder::default(),
            cost: Cost::TOKENS,
        }
    }
}

impl DistributedConfig {
    /// Lets steps come in a random order, another one each epoch.
    #[must_use]
    pub fn with_shuffle(self, seed: Seed) -> Self {
        Self { shuffle: Some(seed), ..self }
    }

    /// Sets what makes a step; [`StepLayout::Grouped`] by default.
    #[must_use]
    pub fn with_layout(self, layout: StepLayout) -> Self {
        Self { layout, ..self }
    }

    /// Sets what happens to batches that cannot fill up a step; [`StepRemainder::Split`] by
    /// default.
    #[must_use]
    pub fn with_remainder(self, remainder: StepRemainder) -> Self {
        Self { remainder, ..self }
    }

    /// Sets what to balance across the ranks within a step; the padded tokens by default.
    #[must_use]
    pub fn with_cost(self, cost: Cost) -> Self {
        Self { cost, ..self }
    }
}
