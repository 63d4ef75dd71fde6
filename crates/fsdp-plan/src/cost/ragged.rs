//! The parts of ragged units, each of which every member has another one of: units × members steps.

use super::{
    CostModel,
    loads::{Load, Loads},
    pricing::Pricing,
};
use crate::{ParameterInfo, arithmetic::index, cut::Ragged, shares::Shares};

/// The parameters of a unit, in order.
pub(super) type Unit<'a> = Vec<(&'a ParameterInfo, Ragged)>;

/// Loads each member with its parts of all units, and returns the largest share of each unit, in their order.
pub(super) fn measure(units: &[Unit<'_>], shares: &Shares, model: &CostModel, loads: &mut Loads) -> Vec<Share> {
    let mut scratch = vec![Share::default(); shares.group().as_usize()];
    units.iter().map(|unit| measure_unit(unit, shares, model, loads, &mut scratch)).collect()
}

/// Adds the parts of a unit to `loads`, and returns the largest share in each respect.
///
/// `scratch` has an empty share for each member, and has it again afterwards.
fn measure_unit(
    unit: &Unit<'_>,
    shares: &Shares,
    model: &CostModel,
    loads: &mut Loads,
    scratch: &mut [Share],
) -> Share {
    // Owners are mostly neighbors, so that only the shares from the first to the last need to be looked at.
    let (mut first, mut last) = (scratch.len(), 0);
    for &(info, parts) in unit {
        let pricing = Pricing::of(model, info);
        for (owner, part) in parts.parts(shares, 0..info.numel()) {
            let (owner_idx, numel) = (index(owner), part.end - part.start);
            (first, last) = (first.min(owner_idx), last.max(owner_idx));
            let piece = pricing.piece(numel);
            scratch[owner_idx].add(pricing, piece.stored, numel);
            loads.add_one(owner, Load { stored: 0, ..piece });
        }
    }
    let shares = scratch.get_mut(first..=last).unwrap_or_default();
    let largest = shares.iter().copied().reduce(Share::max).unwrap_or_default();
    shares.fill(Share::default());
    largest
}

/// What one member has of a ragged unit, in bytes.
#[derive(Clone, Copy, Default)]
pub(super) struct Share {
    pub(super) stored: i128,
    pub(super) gather: u128,
    pub(super) reduce: u128,
}

impl Share {
    fn add(&mut self, pricing: Pricing, stored: i128, numel: u64) {
        self.stored += stored;
        self.gather += pricing.gather.bytes(numel.into());
        self.reduce += pricing.reduced_bytes(numel.into());
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
