//! One walk over a plan, which adds up what members hold and what travels between them.

use std::collections::BTreeMap;

use core_types::WorldSize;

use super::{
    CostModel,
    loads::{Load, Loads, Pricing},
    ragged::{self, Share},
};
use crate::{
    cut::{Chunks, Cut, Division, shares::Shares},
    param::{ParameterInfo, groups::NamedGroups},
    plan::ShardingPlan,
};

/// The units to walk over, each with the positions of its parameters.
pub(super) struct Units<'a>(pub(super) Vec<(&'a str, Vec<usize>)>);

impl<'a> Units<'a> {
    /// Those of a plan, in the order in which their parameters first occur.
    pub(super) fn of(plan: &'a ShardingPlan) -> Self {
        let groups =
            NamedGroups::of(plan.parameters().iter().map(|parameter| parameter.info().unit()));
        let mut units: Vec<_> = groups.names.into_iter().map(|name| (name, Vec::new())).collect();
        for (position, unit) in groups.of_item.into_iter().enumerate() {
            units[unit].1.push(position);
        }
        Self(units)
    }
}

/// What a walk over a plan finds.
pub(super) struct Tally<'a> {
    model: CostModel,
    shares: &'a Shares,
    /// What members hold, if the units are those of the plan: a parameter counts for each of its
    /// units.
    loads: Loads,
    pub(super) units: Vec<UnitTally<'a>>,
    /// The bytes of the largest gradient of a parameter, before it is reduced.
    pub(super) largest_grad_bytes: u128,
}

/// What of a unit travels.
#[derive(Debug, Default)]
pub(super) struct UnitTally<'a> {
    pub(super) name: &'a str,
    /// Parameters that a shard group puts together.
    pub(super) gathered: Buffer,
    /// Their gradients.
    pub(super) reduced: Buffer,
    /// Gradients of replicated parameters.
    pub(super) copies: Buffer,
    /// The bytes of replicated parameters.
    pub(super) replicated_bytes: u128,
}

/// Parameters or gradients that travel in one call.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    pub(super) parameters: Vec<usize>,
    pub(super) payload_bytes: u128,
    /// That of which every member has an equal part, with padding.
    even_bytes: u128,
    /// What single members own besides.
    of_owner: BTreeMap<u64, u128>,
}

impl Buffer {
    /// The bytes of all parts, padding included.
    pub(super) fn bytes(&self) -> u128 {
        self.even_bytes + self.of_owner.values().sum::<u128>()
    }

    /// What the member with the most has, as each brings it to a sum of such parts.
    pub(super) fn largest_part(&self, plan: &ShardingPlan) -> Self {
        let even = self.even_bytes / u128::from(plan.shard_group().as_u64());
        let bytes = even + self.of_owner.values().fold(0, |most, &bytes| most.max(bytes));
        let parameters = self.parameters.clone();
        Self { parameters, payload_bytes: bytes, even_bytes: bytes, ..Self::default() }
    }

    /// What the member with the least has, at least, where parts are padded to equal sizes or not.
    pub(super) fn smallest_part_bytes(&self, plan: &ShardingPlan, is_padded: bool) -> u128 {
        let members = u128::from(plan.shard_group().as_u64());
        let chunk = self.even_bytes / members;
        let owned: u128 = self.of_owner.values().sum();
        // What the others leave to the last one, if all of them have as much as they can.
        let left_over = (self.payload_bytes - owned).saturating_sub((members - 1) * chunk);
        let even = if is_padded { chunk } else { left_over };
        // Whoever is not among the owners owns nothing.
        let least = self.of_owner.values().min().filter(|_| self.of_owner.len() as u128 == members);
        even + least.map_or(0, |&bytes| bytes)
    }

    fn add_payload(&mut self, position: usize, bytes: u128) {
        self.parameters.push(position);
        self.payload_bytes += bytes;
    }
}

impl<'a> Tally<'a> {
    pub(super) fn of(plan: &'a ShardingPlan, model: &CostModel, units: &Units<'a>) -> Self {
        let mut tally = Self {
            model: *model,
            shares: plan.shares(),
            loads: Loads::new(plan.shard_group()),
            units: Vec::with_capacity(units.0.len()),
            largest_grad_bytes: 0,
        };
        let mut ragged = ragged::Scratch::new(plan.shard_group());
        for (name, members) in &units.0 {
            let unit = tally.unit(plan, name, members, &mut ragged);
            tally.units.push(unit);
        }
        ragged.add_middles(&mut tally.loads);
        tally
    }

    /// What each member holds between two steps.
    pub(super) fn members(&self) -> impl Iterator<Item = Load> + Clone {
        let pads = self.model.pads();
        let without_padding = |load: Load| Load { stored: load.owned, ..load };
        self.loads.of_members().map(move |load| if pads { load } else { without_padding(load) })
    }

    fn group(&self) -> WorldSize {
        self.shares.group()
    }

    fn unit(
        &mut self,
        plan: &'a ShardingPlan,
        name: &'a str,
        members: &[usize],
        ragged: &mut ragged::Scratch,
    ) -> UnitTally<'a> {
        let mut unit = UnitTally { name, ..UnitTally::default() };
        let mut of_unit: ragged::Unit<'_> = Vec::new();
        for &position in members {
            let parameter = &plan.parameters()[position];
            let info = parameter.info();
            let division = parameter.division();
            self.add_payload(&mut unit, position, info, &division);
            match (parameter.cut(), division) {
                // Measured below, all of the unit together.
                (Cut::Ragged { .. }, Division::Ragged(parts)) => of_unit.push((info, parts)),
                (_, division) => self.add(&mut unit, info, parameter.cut(), division),
            }
        }
        if !of_unit.is_empty() {
            let largest = ragged.measure(&of_unit, self.shares, &self.model, &mut self.loads);
            self.add_ragged(&mut unit, largest);
        }
        unit
    }

    /// Notes which parameters travel how, and what they weigh without padding.
    fn add_payload(
        &mut self,
        unit: &mut UnitTally<'_>,
        position: usize,
        info: &ParameterInfo,
        division: &Division,
    ) {
        let pricing = Pricing::of(&self.model, info);
        let param_bytes = pricing.gather.bytes(info.numel().into());
        let grad_bytes = pricing.reduced_bytes(info.numel().into());
        let reduced = match division {
            Division::Nothing => return,
            Division::Replicated { .. } => {
                unit.replicated_bytes += param_bytes;
                &mut unit.copies
            }
            Division::Chunks(_) | Division::Ragged(_) | Division::Whole { .. } => {
                unit.gathered.add_payload(position, param_bytes);
                &mut unit.reduced
            }
        };
        if info.requires_grad() {
            reduced.add_payload(position, grad_bytes);
            self.largest_grad_bytes = self.largest_grad_bytes.max(grad_bytes);
        }
    }

    /// Adds what a parameter weighs with padding, and what members hold of it.
    fn add(
        &mut self,
        unit: &mut UnitTally<'_>,
        info: &ParameterInfo,
        cut: Cut,
        division: Division,
    ) {
        let pricing = Pricing::of(&self.model, info);
        match division {
            Division::Chunks(chunks) => self.add_chunks(unit, pricing, cut, chunks),
            Division::Ragged(parts) => {
                for (owner, part) in parts.parts(self.shares, 0..info.numel()) {
                    self.add_owned(unit, pricing, owner, part.end - part.start);
                }
            }
            Division::Whole { owner, numel } => self.add_owned(unit, pricing, owner, numel),
            Division::Replicated { numel } => {
                self.loads.add_all(pricing.piece(numel));
                unit.copies.even_bytes += pricing.reduced_bytes(numel.into());
            }
            Division::Nothing => {}
        }
    }

    fn add_owned(&mut self, unit: &mut UnitTally<'_>, pricing: Pricing, owner: u64, numel: u64) {
        self.loads.add_one(owner, pricing.piece(numel));
        *unit.gathered.of_owner.entry(owner).or_default() += pricing.gather.bytes(numel.into());
        *unit.reduced.of_owner.entry(owner).or_default() += pricing.reduced_bytes(numel.into());
    }

    fn add_chunks(&mut self, unit: &mut UnitTally<'_>, pricing: Pricing, cut: Cut, chunks: Chunks) {
        let group = self.group();
        // Where there is padding, a flat unit is one tensor, which its first parameter stands for.
        let is_one_tensor = matches!(cut, Cut::Flat { .. }) && self.model.pads();
        for (members, numel) in chunks.runs(group) {
            let piece = pricing.piece(numel);
            let load = if is_one_tensor {
                Load { owned: piece.owned, ..Load::default() }
            } else {
                Load { stored: 0, ..piece }
            };
            self.loads.add_run(members, load);
        }
        if !chunks.is_first() {
            return;
        }
        let chunk_numel = chunks.chunk_numel(group);
        let padded = Load { owned: 0, ..pricing.piece(chunk_numel) };
        let stored = Load { grad: 0, optimizer: 0, ..padded };
        self.loads.add_all(if is_one_tensor { padded } else { stored });
        if cut == Cut::Dim0 && self.model.pads() {
            self.add_states_of_empty_shards(chunks, pricing);
        }
        let buffer_numel = u128::from(chunk_numel) * u128::from(group.as_u64());
        unit.gathered.even_bytes += pricing.gather.bytes(buffer_numel);
        unit.reduced.even_bytes += pricing.reduced_bytes(buffer_numel);
    }

    /// `fully_shard` gives the optimizer a tensor on every rank, also where that has no rows.
    fn add_states_of_empty_shards(&mut self, chunks: Chunks, pricing: Pricing) {
        #[expect(clippy::expect_used, reason = "a division without elements is `Nothing`")]
        let n_owners =
            chunks.runs(self.group()).map(|(members, _)| members.end).max().expect("rows");
        self.loads.add_run(n_owners..self.group().as_u64(), pricing.piece(0));
    }

    /// Adds what the ragged parameters of a unit weigh with padding: room for their largest share,
    /// and what travels.
    fn add_ragged(&mut self, unit: &mut UnitTally<'_>, largest: Share) {
        let Share { stored, gather, reduce } = largest;
        self.loads.add_all(Load { stored, ..Load::default() });
        let members = u128::from(self.group().as_u64());
        unit.gathered.even_bytes += gather * members;
        unit.reduced.even_bytes += reduce * members;
    }
}
