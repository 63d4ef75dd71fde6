//! Which run of a ragged buffer belongs to whom, and how that changes when the world does.

use std::collections::BTreeSet;

use core_types::WorldSize;
use serde::{Deserialize, Serialize};

use crate::{
    arithmetic::{gcd, index},
    error::{CutError, Error, Result},
};

/// How a buffer is divided over the members of a shard group: runs of it, in order, each with its
/// owner.
///
/// Every member owns one run of equal length, unless the plan was
/// [resized](crate::ShardingPlan::resized): then members keep what they had, as far as they may,
/// and own several runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    group: WorldSize,
    /// `None` if all shares are equal and in the order of the members.
    table: Option<Table>,
}

/// Runs of a buffer whose length counts as `total`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Table {
    total: u64,
    /// The end of each run, and its owner.
    runs: Vec<(u64, u64)>,
}

/// A run of a buffer, as a fraction: from `start` to `end` of `total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnedRun {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) total: u64,
    pub(crate) owner: u64,
}

impl Shares {
    /// Equal shares in order.
    pub(crate) fn even(group: WorldSize) -> Self {
        Self { group, table: None }
    }

    /// The shares of a table that was read.
    ///
    /// # Errors
    ///
    /// [`CutError::BrokenShares`] if the runs do not follow each other up to the total, or the
    /// owners are not all members of the group.
    pub(crate) fn from_table(group: WorldSize, table: Table) -> Result<Self> {
        let ends = || table.runs.iter().map(|&(end, _)| end);
        let in_order = ends().zip(ends().skip(1)).all(|(end, next)| end < next);
        let complete = ends().next().is_some_and(|end| end > 0)
            && table.runs.last().is_some_and(|&(end, _)| end == table.total);
        let owners: BTreeSet<u64> = table.runs.iter().map(|&(_, owner)| owner).collect();
        let all_own = owners.into_iter().eq(0..group.as_u64());
        if in_order && complete && all_own {
            Ok(Self { group, table: Some(table) })
        } else {
            Err(Error::Cut(CutError::BrokenShares { total: table.total, group: group.as_u64() }))
        }
    }

    /// The number of members.
    pub(crate) fn group(&self) -> WorldSize {
        self.group
    }

    /// The runs, if they are not simply equal.
    pub(crate) fn table(&self) -> Option<&Table> {
        self.table.as_ref()
    }

    /// The length of the whole, in the unit of [`OwnedRun`].
    pub(crate) fn total(&self) -> u64 {
        match &self.table {
            None => self.group.as_u64(),
            Some(table) => table.total,
        }
    }

    /// The number of runs.
    pub(crate) fn len(&self) -> u64 {
        match &self.table {
            None => self.group.as_u64(),
            Some(table) => table.runs.len() as u64,
        }
    }

    /// The run at `position`, which is below [`len`](Self::len).
    pub(crate) fn run(&self, position: u64) -> OwnedRun {
        let total = self.total();
        match &self.table {
            None => OwnedRun { start: position, end: position + 1, total, owner: position },
            Some(Table { runs, .. }) => {
                let at = index(position);
                let start = if at == 0 { 0 } else { runs[at - 1].0 };
                OwnedRun { start, end: runs[at].0, total, owner: runs[at].1 }
            }
        }
    }

    /// The position of the run that holds the point `at` below the total.
    pub(crate) fn position(&self, at: u64) -> u64 {
        match &self.table {
            None => at,
            Some(table) => table.runs.partition_point(|&(end, _)| end <= at) as u64,
        }
    }

    /// The positions of the runs of one member, in order.
    pub(crate) fn of_member(&self, member: u64) -> impl Iterator<Item = u64> {
        let (mine, all) = match &self.table {
            None => (member..member + 1, None),
            Some(table) => (0..0, Some(table.runs.iter())),
        };
        let of_table =
            (0..).zip(all.into_iter().flatten()).filter(move |(_, (_, owner))| *owner == member);
        mine.chain(of_table.map(|(position, _)| position))
    }

    /// The shares of another number of members, all equally large, that leave as much as possible
    /// where it is.
    ///
    /// A member that stays keeps the first part of what it owns, up to its new share. What lies
    /// beyond that, and all that members own who leave, is given out in order, first to the members
    /// that stay and then to the new ones.
    ///
    /// # Complexity
    ///
    /// Linear in runs + members, and there are at most old runs + new members afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] after so many sizes that the common denominator leaves 64 bits.
    pub(crate) fn resized(&self, group: WorldSize) -> Result<Self> {
        let members = group.as_u64();
        let factor = members / gcd(members, self.total());
        let too_large = Error::TotalTooLarge { what: "the denominators of the world sizes" };
        let total = self.total().checked_mul(factor).ok_or(too_large)?;
        let mut wanted = vec![total / members; group.as_usize()];
        let kept = self.keep(factor, &mut wanted);
        Ok(Self { group, table: Some(Table { total, runs: give_out(kept, wanted) }) })
    }

    /// The runs in order, stretched by `factor`: each with its owner as far as that one `wanted`
    /// it, the rest without.
    fn keep(&self, factor: u64, wanted: &mut [u64]) -> Vec<(u64, Option<u64>)> {
        let mut kept = Vec::new();
        for run in (0..self.len()).map(|position| self.run(position)) {
            let len = (run.end - run.start) * factor;
            let of_owner = match wanted.get_mut(index(run.owner)) {
                None => 0, // a member that leaves keeps nothing
                Some(wanted) => {
                    let of_owner = len.min(*wanted);
                    *wanted -= of_owner;
                    of_owner
                }
            };
            kept.push((of_owner, Some(run.owner)));
            kept.push((len - of_owner, None));
        }
        kept.retain(|&(len, _)| len > 0);
        kept
    }
}

/// Gives the runs without an owner to the members that still want something, in order.
fn give_out(kept: Vec<(u64, Option<u64>)>, wanted: Vec<u64>) -> Vec<(u64, u64)> {
    let mut in_want = (0..).zip(wanted).peekable();
    let mut runs = Vec::new();
    let mut end = 0;
    for (mut len, owner) in kept {
        if let Some(owner) = owner {
            end += len;
            push(&mut runs, end, owner);
            continue;
        }
        while len > 0 {
            #[expect(clippy::expect_used, reason = "all that is wanted is exactly the total")]
            let (member, wanted) = in_want.peek_mut().expect("what is left is wanted by someone");
            let given = len.min(*wanted);
            (len, *wanted, end) = (len - given, *wanted - given, end + given);
            if given > 0 {
                push(&mut runs, end, *member);
            }
            if *wanted == 0 {
                in_want.next();
            }
        }
    }
    runs
}

/// Appends a run, or lengthens the last one if it has the same owner.
fn push(runs: &mut Vec<(u64, u64)>, end: u64, owner: u64) {
    match runs.last_mut() {
        Some(last) if last.1 == owner => last.0 = end,
        _ => runs.push((end, owner)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn even(group: u64) -> Shares {
        Shares::even(WorldSize::new(group).unwrap())
    }

    /// The part of the whole that each member owns, in units of `total`.
    fn owned(shares: &Shares, total: u64) -> Vec<u64> {
        let len = |position| shares.run(position).end - shares.run(position).start;
        let of_member =
            |member| shares.of_member(member).map(len).sum::<u64>() * total / shares.total();
        (0..shares.group().as_u64()).map(of_member).collect()
    }

    /// How much of the whole lies with the same member before and after, in units of `total`.
    fn staying(before: &Shares, after: &Shares, total: u64) -> u64 {
        let owner = |shares: &Shares, at: u64| {
            shares.run(shares.position(at * shares.total() / total)).owner
        };
        (0..total).filter(|&at| owner(before, at) == owner(after, at)).count() as u64
    }

    #[test]
    fn resizing_leaves_as_much_as_possible_where_it_is() {
        for from in 1..=12_u64 {
            for to in 1..=12_u64 {
                let total = from * to;
                let resized = even(from).resized(WorldSize::new(to).unwrap()).unwrap();
                assert_eq!(owned(&resized, total), vec![from; usize::try_from(to).unwrap()]);
                // A member that stays keeps the smaller of its two shares.
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
            assert!(Shares::from_table(size, next.table().unwrap().clone()).is_ok());
            shares = next;
        }
    }

    #[test]
    fn too_many_odd_sizes_are_an_error() {
        let total = (1 << 62) + 1;
        let shares = Shares { table: Some(Table { total, runs: vec![(total, 0)] }), ..even(1) };
        assert!(matches!(
            shares.resized(WorldSize::new(1 << 10).unwrap()),
            Err(Error::TotalTooLarge { .. })
        ));
    }

    #[test]
    fn broken_tables_are_refused() {
        let group = WorldSize::new(2).unwrap();
        let refused = |total, runs: &[(u64, u64)]| {
            Shares::from_table(group, Table { total, runs: runs.to_vec() }).is_err()
        };
        assert!(
            refused(2, &[])
                && refused(2, &[(1, 0)])
                && refused(2, &[(1, 0), (2, 2)])
                && refused(2, &[(2, 0), (1, 1)])
        );
        assert!(refused(0, &[(0, 0)]) && !refused(2, &[(1, 1), (2, 0)]));
    }
}
