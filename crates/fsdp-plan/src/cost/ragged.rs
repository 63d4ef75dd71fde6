//! The loads of ragged units, where every member has another part.
//!
//! Most members lie in the middle of a parameter and have one of two amounts of it. The middles of
//! units that differ in nothing but where they are rounded, as the blocks of a model do, are loaded
//! together. So only the edges of parameters take a step each, and the members once per kind of
//! units: at most parameters + kinds × members. One at a time, t5-large on 16,384 ranks takes
//! 570,000 steps, and together at most 82,000.

use std::{collections::BTreeMap, mem, ops::AddAssign};

use core_types::WorldSize;

use super::{
    CostModel,
    loads::{Load, Loads, Pricing},
};
use crate::{
    arithmetic::index,
    cut::{Middle, Ragged, Stride, shares::Shares},
    param::ParameterInfo,
};

/// What is measured from unit to unit.
pub(super) struct Scratch {
    /// What members have of one unit, but for those in the middle of a parameter.
    of_member: Vec<Share>,
    /// The members that have anything, some repeatedly.
    touched: Vec<usize>,
    /// Middles of parameters that are not loaded yet: those of each unit, by what is alike in them.
    middles: BTreeMap<Vec<(Pricing, Stride)>, Vec<Vec<Middle>>>,
}

/// The ragged parameters of a unit, in order.
pub(super) type Unit<'a> = Vec<(&'a ParameterInfo, Ragged)>;

impl Scratch {
    pub(super) fn new(group: WorldSize) -> Self {
        let of_member = vec![Share::default(); group.as_usize()];
        Self { of_member, touched: Vec::new(), middles: BTreeMap::new() }
    }

    /// Loads each member with its parts of a unit, but for the middles of parameters, and returns
    /// the largest share in each respect.
    pub(super) fn measure(
        &mut self,
        unit: &[(&ParameterInfo, Ragged)],
        shares: &Shares,
        model: &CostModel,
        loads: &mut Loads,
    ) -> Share {
        let mut largest = Share::default();
        let mut alike = Vec::with_capacity(unit.len());
        let mut middles = Vec::with_capacity(unit.len());
        for &(info, parts) in unit {
            let pricing = Pricing::of(model, info);
            let middle = parts.middle(shares);
            for (owner, part) in parts.outer_parts(shares, middle.as_ref()) {
                let numel = part.end - part.start;
                loads.add_one(owner, load(pricing, numel));
                self.add(owner, Share::of(pricing, numel));
            }
            if let Some(middle) = middle {
                largest = largest.max(largest_share(pricing, &middle));
                alike.push((pricing, middle.stride));
                middles.push(middle);
            }
        }
        self.middles.entry(alike).or_default().push(middles);
        largest.max(self.take_largest())
    }

    /// Loads the members in the middle of parameters.
    pub(super) fn add_middles(self, loads: &mut Loads) {
        for (alike, units) in self.middles {
            for (nth, (pricing, stride)) in alike.into_iter().enumerate() {
                let middles: Vec<Middle> = units.iter().map(|middles| middles[nth]).collect();
                add_alike(pricing, stride, &middles, loads);
            }
        }
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

/// Of the members in the middle of a parameter.
fn largest_share(pricing: Pricing, middle: &Middle) -> Share {
    let Stride { numel, granule_numel, .. } = middle.stride;
    Share::of(pricing, if middle.n_larger() > 0 { numel + granule_numel } else { numel })
}

/// Loads the members in these middles: all of them with the least that each has, and some with
/// granules besides. If these are few, one at a time; else member by member, each with as many more
/// or less than the one before it.
#[expect(clippy::cast_possible_wrap, reason = "there are fewer middles than parameters")]
fn add_alike(pricing: Pricing, stride: Stride, middles: &[Middle], loads: &mut Loads) {
    let least = load(pricing, stride.numel);
    loads.add_run(stride.members(), least * middles.len() as i64);
    let mut granule = load(pricing, stride.numel + stride.granule_numel);
    granule -= least;
    if middles.iter().map(Middle::n_larger).sum::<u64>() < stride.members().count() as u64 {
        middles.iter().flat_map(Middle::larger).for_each(|member| loads.add_one(member, granule));
        return;
    }
    let mut before = 0;
    for (member, n_granules) in stride.members().zip(stride.granules(middles)) {
        if n_granules != before {
            loads.add_from(member, granule * (n_granules as i64 - before as i64));
            before = n_granules;
        }
    }
    loads.add_from(stride.members().end, granule * -(before as i64));
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
