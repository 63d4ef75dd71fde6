//! Sums over all members of a shard group that do not look at each of them for each parameter.
//!
//! Most cuts load a few runs of neighboring members equally. So it is enough to note where a load
//! begins and ends, and to add up once, from the first member to the last: parameters + members
//! steps instead of parameters × members, which would be 744 million for DeepSeek-V3 on 16,384
//! ranks.

use std::ops::{AddAssign, Mul, Range, SubAssign};

use core_types::WorldSize;

use super::{CostModel, Optimizer};
use crate::{arithmetic::index, elem::ElemType, param::ParameterInfo};

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

/// What the elements of one parameter cost.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pricing {
    held: ElemType,
    pub(super) gather: ElemType,
    pub(super) reduce: ElemType,
    /// The dtype in which gradients are held once they are reduced, if they are.
    grad: Option<ElemType>,
    /// `None` if the parameter is not trained.
    optimizer: Option<Optimizer>,
}

impl Pricing {
    pub(super) fn of(model: &CostModel, info: &ParameterInfo) -> Self {
        let (gather, reduce) = model.wire_dtypes(info);
        let held = model.held_dtype(info);
        let grad = (!model.optimizer_in_backward).then(|| model.grad_dtype(info));
        let optimizer = info.requires_grad().then_some(model.optimizer);
        Self { held, gather, reduce, grad, optimizer }
    }

    /// The load of a tensor of `numel` elements that is all a member has of the parameter.
    pub(super) fn piece(self, numel: u64) -> Load {
        let owned = signed(self.held.bytes(numel.into()));
        match self.optimizer {
            None => Load { owned, stored: owned, ..Load::default() },
            Some(optimizer) => {
                let grad = self.grad.map_or(0, |grad| signed(grad.bytes(numel.into())));
                let optimizer = signed(optimizer.state_bytes(self.held, numel.into()));
                Load { owned, stored: owned, grad, optimizer }
            }
        }
    }

    /// The bytes of gradients of `numel` elements as they travel.
    pub(super) fn reduced_bytes(self, numel: u128) -> u128 {
        if self.optimizer.is_some() { self.reduce.bytes(numel) } else { 0 }
    }
}

fn signed(bytes: u128) -> i128 {
    #[expect(clippy::expect_used, reason = "2^64 elements of the widest block, a few times")]
    let bytes = i128::try_from(bytes).expect("at most 2^72");
    bytes
}
