//! Configuration of a grid.

/// The points of a step at which ranks wait for each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Synchronization {
    /// Every micro-step, as with sharded parameters: a step takes the sum of the largest cells of
    /// its micro-steps.
    #[default]
    MicroStep,
    /// Once per step, as with replicated parameters: a step takes the largest sum of a rank's cells.
    Step,
}

/// The configuration of [`StepLayout::Grid`](crate::StepLayout::Grid).
///
/// # Examples
///
/// ```
/// use dyn_batch::{DistributedConfig, GridConfig, StepLayout};
///
/// let grid = GridConfig { global_batch_size: Some(512), ..GridConfig::default() };
/// let config = DistributedConfig {
///     layout: StepLayout::Grid(grid),
///     accumulation: Some(4),
///     ..DistributedConfig::default()
/// };
/// assert_eq!(config.accumulation, Some(4));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[expect(clippy::exhaustive_structs, reason = "callers take the other fields from `Default`")]
pub struct GridConfig {
    /// Number of sequences of a step over all ranks; as many as fit by default.
    pub global_batch_size: Option<u64>,
    /// Points at which ranks wait for each other; [`Synchronization::MicroStep`] by default.
    pub synchronization: Synchronization,
}
