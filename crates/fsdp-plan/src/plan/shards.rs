//! The shards of one rank, parameter by parameter.

use std::ops::Range;

use core_types::{Placement, Rank};

use super::{PlannedParameter, ShardingPlan};
use crate::{cut::ShardAssignment, error::Result};

/// An iterator over the shards of one rank in a range of parameters.
#[derive(Clone, Debug)]
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub(crate) struct ShardsOfRank<'a> {
    plan: &'a ShardingPlan,
    rank: Rank,
    parameters: Range<usize>,
}

impl<'a> ShardsOfRank<'a> {
    pub(crate) fn new(
        plan: &'a ShardingPlan,
        rank: Rank,
        parameters: Range<usize>,
    ) -> Result<Self> {
        let place = Placement::new(rank.as_u64(), plan.world_size.as_u64())?;
        Ok(Self { plan, rank: place.rank(), parameters })
    }

    /// Returns the next shard and the index of its parameter.
    pub(crate) fn next_shard(&mut self) -> Option<(usize, ShardAssignment)> {
        let group = self.plan.shard_group;
        let member = self.rank.as_u64() % group.as_u64();
        self.parameters.find_map(|position| {
            let parameter = &self.plan.parameters[position];
            let (index, part) = parameter.prepared_cut().part(group, member);
            (!part.is_empty())
                .then(|| (position, ShardAssignment::new(self.rank, index, parameter.info(), part)))
        })
    }
}

impl<'a> Iterator for ShardsOfRank<'a> {
    type Item = (&'a PlannedParameter, ShardAssignment);

    fn next(&mut self) -> Option<Self::Item> {
        let (position, shard) = self.next_shard()?;
        Some((&self.plan.parameters[position], shard))
    }
}
