//! The version of the text form of plans.

/// The version of the serialized form of a [`ShardingPlan`](crate::ShardingPlan); it changes
/// whenever that form does.
pub(crate) const FORMAT_VERSION: u32 = 1;
