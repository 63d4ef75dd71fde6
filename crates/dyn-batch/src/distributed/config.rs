//! Configuration of a distributed batch sampler: the layout of steps, and the last step.

use core_types::Seed;

use crate::{config::Cost, grid::GridConfig};

/// The policy if the number of batches is not a multiple of the world size.
///
/// Every rank must take the same number of steps: a rank with one batch less leaves the others
/// waiting in their collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
#[doc(alias = "drop_last")]
pub enum StepRemainder {
    /// The batches with the most padding are split in two; each sequence occurs exactly once.
    #[default]
    Split,
    /// The last batches are dropped, and the report counts their sequences.
    Drop,
    /// The first batches are repeated.
    Repeat,
}

/// The layout of a step over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum StepLayout {
    /// One batch per rank, of similar cost: the least padding.
    #[default]
    Grouped,
    /// One global batch, divided over the ranks: equally many sequences per rank, of nearly the
    /// same cost. This is the least waiting, especially if attention skips the padding.
    ///
    /// Buckets and packed rows do not support it.
    Dealt,
    /// The next sequences of the order as a grid of micro-batches that keeps all ranks equally busy:
    /// padded cells cut from the sorted sequences, or packed rows of equal cost. The limits of batches
    /// are limits of a cell. What is left at the end of an epoch is dropped, or kept in a step of
    /// fewer micro-batches, by [`Remainder`](crate::Remainder).
    ///
    /// Buckets and windows do not support it.
    Grid(GridConfig),
}

/// The configuration of a [`DistributedBatchSampler`](crate::DistributedBatchSampler).
///
/// # Examples
///
/// ```
/// use core_types::Seed;
/// use dyn_batch::{Cost, DistributedConfig, StepRemainder};
///
/// let config = DistributedConfig {
///     shuffle: Some(Seed::new(7)),
///     cost: Cost::ATTENTION,
///     ..DistributedConfig::default()
/// };
/// assert_eq!(config.remainder, StepRemainder::Split);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[expect(clippy::exhaustive_structs, reason = "callers take the other fields from `Default`")]
pub struct DistributedConfig {
    /// Seed for a random order of steps, different in each epoch; no shuffle by default.
    pub shuffle: Option<Seed>,
    /// Layout of steps; [`StepLayout::Grouped`] by default.
    pub layout: StepLayout,
    /// Policy for batches that cannot fill a step; [`StepRemainder::Split`] by default.
    pub remainder: StepRemainder,
    /// Cost to balance over the ranks of a step; padded tokens by default.
    pub cost: Cost,
    /// Number of micro-batches per rank in a step. By default 1, or the fewest that hold a global batch
    /// of a grid. Dealt steps do not support it.
    #[doc(alias = "gradient_accumulation_steps")]
    pub accumulation: Option<u64>,
}

impl Default for DistributedConfig {
    fn default() -> Self {
        Self {
            shuffle: None,
            layout: StepLayout::default(),
            remainder: StepRemainder::default(),
            cost: Cost::TOKENS,
            accumulation: None,
        }
    }
}
