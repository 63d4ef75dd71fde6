//! The version of the serialized form of plans.

/// The version of the serialized form of a [`ShardingPlan`](crate::ShardingPlan). It changes
/// whenever that form does.
pub(crate) const FORMAT_VERSION: u32 = 1;
