//! The loads of ragged units, where every member has another part.
//!
//! Most members lie in the middle of a parameter and have one of two amounts of it. They are loaded
//! with the smaller one all at once, so that only the edges of parameters and the members with the
//! larger one take a step each: at most parameters + units × members.

use std::{mem, ops::AddAssign};

use core_types::WorldSize;

use super::{
    CostModel,
    loads::{Load, Loads},
    pricing::Pricing,
};
use crate::{
    arithmetic::index,
    cut::{Middle, Ragged},
    param::ParameterInfo,
    shares::Shares,
};

/// What members have of a unit, but for those in the middle of a parameter; kept from unit to unit,
/// because it has a place for each member of a group.
pub(super) struct Scratch {
    of_member: Vec<Share>,
    /// The members that have anything, some repeatedly.
    touched: Vec<usize>,
}

/// The ragged parameters of a unit, in order.
pub(super) type Unit<'a> = Vec<(&'a ParameterInfo, Ragged)>;

impl Scratch {
    pub(super) fn new(group: WorldSize) -> Self {
        Self { of_member: vec![Share::default(); group.as_usize()], touched: Vec::new() }
    }

    /// Loads each member with its parts of a unit, and returns the largest share in each respect.
    pub(super) fn measure(
        &mut self,
        unit: &[(&ParameterInfo, Ragged)],
        shares: &Shares,
        model: &CostModel,
        loads: &mut Loads,
    ) -> Share {
        let mut largest = Share::default();
        for &(info, parts) in unit {
            let pricing = Pricing::of(model, info);
            let middle = parts.middle(shares);
            if let Some(middle) = &middle {
                largest = largest.max(add_middle(middle, pricing, loads));
            }
            for (owner, part) in parts.outer_parts(shares, middle.as_ref()) {
                let numel = part.end - part.start;
                loads.add_one(owner, load(pricing, numel));
                self.add(owner, Share::of(pricing, numel));
            }
        }
        largest.max(self.take_largest())
    }

    fn add(&mut self, member: u64, share: Share) {
        self.touched.push(index(member));
        self.of_member[index(member)] += share;
    }

    /// Returns the largest in each respect, and forgets them all.
    fn take_largest(&mut self) -> Share {
        let shares = self.touched.drain(..).map(|member| mem::take(&mut self.of_member[member]));
        shares.fold(Share::default(), Share::max)
    }
}

/// Loads the members in the middle of a parameter, all at once with the least they have, and
/// returns their largest share.
fn add_middle(middle: &Middle, pricing: Pricing, loads: &mut Loads) -> Share {
    let mut largest = middle.numel;
    let larger = middle.numel + middle.granule_numel;
    let least = load(pricing, middle.numel);
    loads.add_run(middle.members.clone(), least);
    let mut more = load(pricing, larger);
    more -= least;
    for member in middle.larger() {
        loads.add_one(member, more);
        largest = larger;
    }
    Share::of(pricing, largest)
}

/// What a part costs its owner, but for the room to store it, which depends on the largest share.
fn load(pricing: Pricing, numel: u64) -> Load {
    if numel == 0 { Load::default() } else { Load { stored: 0, ..pricing.piece(numel) } }
}

/// What one member has of a ragged unit, in bytes.
#[derive(Clone, Copy, Default)]
pub(super) struct Share {
    pub(super) stored: i128,
    pub(super) gather: u128,
    pub(super) reduce: u128,
}

impl Share {
    fn of(pricing: Pricing, numel: u64) -> Self {
        Self {
            stored: pricing.piece(numel).stored,
            gather: pricing.gather.bytes(numel.into()),
            reduce: pricing.reduced_bytes(numel.into()),
        }
    }

    /// The larger of two shares in each respect.
    fn max(self, other: Self) -> Self {
        Self {
            stored: self.stored.max(other.stored),
            gather: self.gather.max(other.gather),
            reduce: self.reduce.max(other.reduce),
        }
    }
}

impl AddAssign for Share {
    fn add_assign(&mut self, other: Self) {
        self.stored += other.stored;
        self.gather += other.gather;
        self.reduce += other.reduce;
    }
}
