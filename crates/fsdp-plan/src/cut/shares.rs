//! The owners of the runs of a ragged buffer, and their change when the world is resized.

use std::collections::BTreeSet;

use core_types::WorldSize;
use serde::{Deserialize, Serialize};

use crate::{
    arithmetic::{gcd, index},
    error::{CutError, Error, Result},
};

/// The division of a buffer over the members of a shard group: consecutive runs, each with an
/// owner.
///
/// Every member owns one run of equal length, unless the plan was
/// [resized](crate::ShardingPlan::resized): members then keep parts of their old runs and own
/// several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupShares {
    n_members: WorldSize,
    /// `None` if every member owns one run of equal length, in order.
    table: Option<ShareTable>,
}

/// The runs of a buffer of length `total`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShareTable {
    total: u64,
    /// End and owner of each run.
    runs: Vec<(u64, u64)>,
}

/// A run of a buffer as a fraction: from `start` to `end` of `total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnedRun {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) total: u64,
    pub(crate) owner: u64,
}

/// A run of a buffer in a new division, before its position is known.
struct LooseRun {
    len: u64,
    /// `None` for a free run.
    owner: Option<u64>,
}

impl GroupShares {
    /// Creates equal shares in the order of the members.
    pub(crate) fn even(n_members: WorldSize) -> Self {
        Self { n_members, table: None }
    }

    /// Creates shares from a deserialized table.
    ///
    /// # Errors
    ///
    /// [`CutError::InvalidShares`] if the runs are not consecutive up to the total, or if the owners
    /// are not exactly the members of the group.
    pub(crate) fn from_table(n_members: WorldSize, table: ShareTable) -> Result<Self> {
        let in_order = table.runs.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let first_end = table.runs.first().map_or(0, |&(end, _)| end);
        let last_end = table.runs.last().map(|&(end, _)| end);
        let is_complete = first_end > 0 && last_end == Some(table.total);
        let owners: BTreeSet<u64> = table.runs.iter().map(|&(_, owner)| owner).collect();
        let all_members_own = owners.into_iter().eq(0..n_members.as_u64());
        if in_order && is_complete && all_members_own {
            Ok(Self { n_members, table: Some(table) })
        } else {
            let group = n_members.as_u64();
            Err(Error::Cut(CutError::InvalidShares { total: table.total, group }))
        }
    }

    /// Returns the number of members.
    pub(crate) fn n_members(&self) -> WorldSize {
        self.n_members
    }

    /// Returns the table of a resized plan.
    pub(crate) fn table(&self) -> Option<&ShareTable> {
        self.table.as_ref()
    }

    /// Returns the length of the buffer in the unit of [`OwnedRun`].
    pub(crate) fn total(&self) -> u64 {
        match &self.table {
            None => self.n_members.as_u64(),
            Some(table) => table.total,
        }
    }

    /// Returns the number of runs.
    pub(crate) fn len(&self) -> u64 {
        match &self.table {
            None => self.n_members.as_u64(),
            Some(table) => table.runs.len() as u64,
        }
    }

    /// Returns the run at `position`, which must be less than [`len`](Self::len).
    pub(crate) fn run(&self, position: u64) -> OwnedRun {
        let total = self.total();
        match &self.table {
            None => OwnedRun { start: position, end: position + 1, total, owner: position },
            Some(ShareTable { runs, .. }) => {
                let i = index(position);
                let start = if i == 0 { 0 } else { runs[i - 1].0 };
                let (end, owner) = runs[i];
                OwnedRun { start, end, total, owner }
            }
        }
    }

    /// Returns the position of the run that contains `point`, which must be less than the total.
    pub(crate) fn position(&self, point: u64) -> u64 {
        match &self.table {
            None => point,
            Some(table) => table.runs.partition_point(|&(end, _)| end <= point) as u64,
        }
    }

    /// Returns the positions of the runs of one member, in order.
    pub(crate) fn runs_of_member(&self, member: u64) -> impl Iterator<Item = u64> {
        // Without a table the only run of a member is at its number.
        let positions = if self.table.is_some() { 0..self.len() } else { member..member + 1 };
        positions.filter(move |&position| self.run(position).owner == member)
    }

    /// Returns equal shares for another number of members that move as little as possible.
    ///
    /// A remaining member keeps the first part of its runs, up to its new share. The rest of its
    /// runs, and the runs of members that leave, go in order to the remaining members and then to
    /// the new ones.
    ///
    /// # Complexity
    ///
    /// Linear in runs + members. The result has at most as many runs as there are old runs and new
    /// members together.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if the common denominator of all sizes so far exceeds 64 bits.
    pub(crate) fn resized(&self, n_members: WorldSize) -> Result<Self> {
        let members = n_members.as_u64();
        let factor = members / gcd(members, self.total());
        let too_large = Error::TotalTooLarge { what: "the denominators of the world sizes" };
        let total = self.total().checked_mul(factor).ok_or(too_large)?;
        let mut missing_lens = vec![total / members; n_members.as_usize()];
        let kept_and_free = self.keep_runs(factor, &mut missing_lens);
        let runs = assign_free_runs(kept_and_free, missing_lens);
        Ok(Self { n_members, table: Some(ShareTable { total, runs }) })
    }

    /// Splits the runs, stretched by `factor`, into kept runs with an owner and free runs without
    /// an owner. Subtracts the kept lengths from the missing length of each member.
    fn keep_runs(&self, factor: u64, missing_lens: &mut [u64]) -> Vec<LooseRun> {
        let mut runs = Vec::new();
        for run in (0..self.len()).map(|position| self.run(position)) {
            let len = (run.end - run.start) * factor;
            let mut kept_len = 0;
            // A member that leaves has no entry and keeps nothing.
            if let Some(missing_len) = missing_lens.get_mut(index(run.owner)) {
                kept_len = len.min(*missing_len);
                *missing_len -= kept_len;
            }
            runs.push(LooseRun { len: kept_len, owner: Some(run.owner) });
            runs.push(LooseRun { len: len - kept_len, owner: None });
        }
        runs.retain(|run| run.len > 0);
        runs
    }
}

/// Assigns the free runs, in order, to the members with a missing length. Returns the end and the
/// owner of each run.
fn assign_free_runs(kept_and_free: Vec<LooseRun>, missing_lens: Vec<u64>) -> Vec<(u64, u64)> {
    let mut members = (0..).zip(missing_lens).peekable();
    let mut runs = Vec::new();
    let mut end = 0;
    for LooseRun { mut len, owner } in kept_and_free {
        if let Some(owner) = owner {
            end += len;
            push_run(&mut runs, end, owner);
            continue;
        }
        while len > 0 {
            #[expect(clippy::expect_used, reason = "free runs are as long as the missing lengths")]
            let (member, missing_len) = members.peek_mut().expect("a member with a missing length");
            let run_len = len.min(*missing_len);
            len -= run_len;
            *missing_len -= run_len;
            end += run_len;
            if run_len > 0 {
                push_run(&mut runs, end, *member);
            }
            if *missing_len == 0 {
                members.next();
            }
        }
    }
    runs
}

/// Appends a run, or extends the last run if it has the same owner.
fn push_run(runs: &mut Vec<(u64, u64)>, end: u64, owner: u64) {
    match runs.last_mut() {
        Some((last_end, last_owner)) if *last_owner == owner => *last_end = end,
        _ => runs.push((end, owner)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn even(group: u64) -> GroupShares {
        GroupShares::even(WorldSize::new(group).unwrap())
    }

    /// Returns the length that each member owns, in units of `total`.
    fn owned(shares: &GroupShares, total: u64) -> Vec<u64> {
        let mut lengths = vec![0; shares.n_members().as_usize()];
        for run in (0..shares.len()).map(|position| shares.run(position)) {
            lengths[index(run.owner)] += run.end - run.start;
        }
        lengths.into_iter().map(|len| len * total / shares.total()).collect()
    }

    /// Returns the length with the same owner before and after, in units of `total`.
    fn staying(old: &GroupShares, new: &GroupShares, total: u64) -> u64 {
        let owner = |shares: &GroupShares, point: u64| {
            shares.run(shares.position(point * shares.total() / total)).owner
        };
        (0..total).filter(|&point| owner(old, point) == owner(new, point)).count() as u64
    }

    #[test]
    fn resizing_moves_the_minimum() {
        for from in 1..=12_u64 {
            for to in 1..=12_u64 {
                let total = from * to;
                let resized = even(from).resized(WorldSize::new(to).unwrap()).unwrap();
                assert_eq!(owned(&resized, total), vec![from; usize::try_from(to).unwrap()]);
                // A remaining member keeps the smaller of its two shares.
                assert_eq!(
                    staying(&even(from), &resized, total),
                    from.min(to) * from.min(to),
                    "{from} to {to}"
                );
                assert!(resized.len() <= from + to);
            }
        }
    }

    #[test]
    fn shares_can_be_resized_again() {
        let sizes = [8, 16, 12, 5, 7].map(|size| WorldSize::new(size).unwrap());
        let mut shares = even(6);
        for size in sizes {
            let next = shares.resized(size).unwrap();
            assert!(owned(&next, size.as_u64()).iter().all(|&share| share == 1), "{next:?}");
            assert!(GroupShares::from_table(size, next.table().unwrap().clone()).is_ok());
            shares = next;
        }
    }

    #[test]
    fn huge_common_denominator_is_an_error() {
        let total = (1 << 62) + 1;
        let shares =
            GroupShares { table: Some(ShareTable { total, runs: vec![(total, 0)] }), ..even(1) };
        assert!(matches!(
            shares.resized(WorldSize::new(1 << 10).unwrap()),
            Err(Error::TotalTooLarge { .. })
        ));
    }

    #[test]
    fn invalid_tables_are_rejected() {
        let group = WorldSize::new(2).unwrap();
        let is_rejected = |total, runs: &[(u64, u64)]| {
            GroupShares::from_table(group, ShareTable { total, runs: runs.to_vec() }).is_err()
        };
        assert!(
            is_rejected(2, &[])
                && is_rejected(2, &[(1, 0)])
                && is_rejected(2, &[(1, 0), (2, 2)])
                && is_rejected(2, &[(2, 0), (1, 1)])
        );
        assert!(is_rejected(0, &[(0, 0)]) && !is_rejected(2, &[(1, 1), (2, 0)]));
    }
}
