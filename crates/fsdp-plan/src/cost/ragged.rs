//! The loads of ragged units, where every member has another part.
//!
//! Most members lie in the middle of a parameter and have one of two amounts of it. They are loaded
//! with the smaller one all at once, so that only the edges of parameters and the members with the
//! larger one take a step each: at most parameters + units × members.

use std::{mem, ops::AddAssign};

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

/// The parameters of a unit, in order.
pub(super) type Unit<'a> = Vec<(&'a ParameterInfo, Ragged)>;

/// Loads each member with its parts of all units, and returns the largest share of each unit, in
/// their order.
pub(super) fn measure(
    units: &[Unit<'_>],
    shares: &Shares,
    model: &CostModel,
    loads: &mut Loads,
) -> Vec<Share> {
    let mut sums =
        Sums { of_member: vec![Share::default(); shares.group().as_usize()], touched: Vec::new() };
    units.iter().map(|unit| measure_unit(unit, shares, model, loads, &mut sums)).collect()
}

/// Adds the parts of a unit to `loads`, and returns the largest share in each respect.
fn measure_unit(
    unit: &Unit<'_>,
    shares: &Shares,
    model: &CostModel,
    loads: &mut Loads,
    sums: &mut Sums,
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
            sums.add(owner, Share::of(pricing, numel));
        }
    }
    largest.max(sums.take_largest())
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

/// What members have of a unit, but for those in the middle of a parameter.
struct Sums {
    of_member: Vec<Share>,
    /// The members that have anything, some repeatedly.
    touched: Vec<usize>,
}

impl Sums {
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
