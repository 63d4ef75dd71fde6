//! Sums over all members of a shard group that do not look at each of them for each parameter.
//!
//! Most cuts load a few runs of neighboring members equally. So it is enough to note where a load
//! begins and ends, and to add up once, from the first member to the last: parameters + members
//! steps instead of parameters × members, which would be 744 million for DeepSeek-V3 on 16,384
//! ranks.

use std::ops::{AddAssign, Mul, Range, SubAssign};

use core_types::WorldSize;

use crate::arithmetic::index;

/// What one member holds, in bytes, before it is known to fit into 64 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) owned: i128,
    pub(super) stored: i128,
    pub(super) grad: i128,
    pub(super) optimizer: i128,
}

impl Load {
    /// What the member holds between two steps.
    pub(super) fn total(&self) -> i128 {
        self.stored + self.grad + self.optimizer
    }
}

impl Mul<i64> for Load {
    type Output = Self;

    /// That of so many tensors.
    fn mul(self, count: i64) -> Self {
        let count = i128::from(count);
        Self {
            owned: self.owned * count,
            stored: self.stored * count,
            grad: self.grad * count,
            optimizer: self.optimizer * count,
        }
    }
}

impl AddAssign for Load {
    fn add_assign(&mut self, other: Self) {
        self.owned += other.owned;
        self.stored += other.stored;
        self.grad += other.grad;
        self.optimizer += other.optimizer;
    }
}

impl SubAssign for Load {
    fn sub_assign(&mut self, other: Self) {
        self.owned -= other.owned;
        self.stored -= other.stored;
        self.grad -= other.grad;
        self.optimizer -= other.optimizer;
    }
}

/// The loads of all members, as the change from each to the next.
pub(super) struct Loads(Vec<Load>);

impl Loads {
    pub(super) fn new(group: WorldSize) -> Self {
        Self(vec![Load::default(); group.as_usize() + 1])
    }

    /// Loads every member.
    pub(super) fn add_all(&mut self, load: Load) {
        self.0[0] += load;
    }

    /// Loads each of `members`.
    pub(super) fn add_run(&mut self, members: Range<u64>, load: Load) {
        self.add_from(members.start, load);
        self.0[index(members.end)] -= load;
    }

    /// Loads one member.
    pub(super) fn add_one(&mut self, member: u64, load: Load) {
        self.add_run(member..member + 1, load);
    }

    /// Loads this member and all behind it.
    pub(super) fn add_from(&mut self, member: u64, load: Load) {
        self.0[index(member)] += load;
    }

    /// The load of each member, from the first to the last.
    pub(super) fn of_members(&self) -> impl Iterator<Item = Load> + Clone {
        let members = &self.0[..self.0.len() - 1];
        members.iter().scan(Load::default(), |sum, &change| {
            *sum += change;
            Some(*sum)
        })
    }
}
