//! The shards of one rank, parameter by parameter.

use std::ops::Range;

use core_types::{Placement, Rank};

use super::{PlannedParameter, ShardingPlan};
use crate::{
    cut::{ShardAssignment, shares::OwnedRun},
    error::Result,
};

/// An iterator over the shards of one rank in a range of parameters.
#[derive(Clone, Debug)]
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub(crate) struct ShardsOfRank<'a> {
    plan: &'a ShardingPlan,
    rank: Rank,
    /// Runs of the rank's member of the shard group, each with its position.
    runs: Vec<(u64, OwnedRun)>,
    parameters: Range<usize>,
    next_run: usize,
}

impl<'a> ShardsOfRank<'a> {
    pub(crate) fn new(
        plan: &'a ShardingPlan,
        rank: Rank,
        parameters: Range<usize>,
    ) -> Result<Self> {
        let place = Placement::new(rank.as_u64(), plan.world_size.as_u64())?;
        let member = place.rank().as_u64() % plan.shard_group().as_u64();
        let positions = plan.shares.runs_of_member(member);
        let runs = positions.map(|position| (position, plan.shares.run(position))).collect();
        Ok(Self { plan, rank: place.rank(), runs, parameters, next_run: 0 })
    }

    /// Returns the next shard and the index of its parameter.
    pub(crate) fn next_shard(&mut self) -> Option<(usize, ShardAssignment)> {
        while !self.parameters.is_empty() {
            let position = self.parameters.start;
            if let Some(shard) = self.next_part(&self.plan.parameters[position]) {
                return Some((position, shard));
            }
            self.next_run = 0;
            self.parameters.start += 1;
        }
        None
    }

    /// Returns the next shard of `parameter`, if any.
    fn next_part(&mut self, parameter: &PlannedParameter) -> Option<ShardAssignment> {
        let prepared_cut = parameter.prepared_cut();
        let n_parts = prepared_cut.max_parts(self.runs.len());
        while self.next_run < n_parts {
            let (position, run) = self.runs[self.next_run];
            self.next_run += 1;
            let (index, part) = prepared_cut.part(&self.plan.shares, position, run);
            if !part.is_empty() {
                return Some(ShardAssignment::new(self.rank, index, parameter.info(), part));
            }
        }
        None
    }
}

impl<'a> Iterator for ShardsOfRank<'a> {
    type Item = (&'a PlannedParameter, ShardAssignment);

    fn next(&mut self) -> Option<Self::Item> {
        let (position, shard) = self.next_shard()?;
        Some((&self.plan.parameters[position], shard))
    }
}
