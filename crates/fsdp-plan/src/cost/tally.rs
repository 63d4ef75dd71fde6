//! One walk over a plan, which adds up what members hold and what travels between them.

use std::collections::BTreeMap;

use core_types::WorldSize;

use super::{
    CostModel,
    loads::{Load, Loads},
    pricing::Pricing,
    ragged::{self, Share},
    schedule::{Kind, Message},
};
use crate::{
    cut::{Chunks, Cut, Division, Ragged},
    groups::NamedGroups,
    param::ParameterInfo,
    plan::{PlannedParameter, ShardingPlan},
    shares::Shares,
};

/// What a walk over a plan finds.
pub(super) struct Tally<'a> {
    model: &'a CostModel,
    shares: &'a Shares,
    pub(super) loads: Loads,
    /// In the order in which their parameters first occur.
    pub(super) messages: Vec<Message<'a>>,
    positions: BTreeMap<(Kind, &'a str), usize>,
}

impl<'a> Tally<'a> {
    pub(super) fn of(plan: &'a ShardingPlan, model: &'a CostModel) -> Self {
        let loads = Loads::new(plan.shard_group());
        let mut tally = Self {
            model,
            shares: plan.shares(),
            loads,
            messages: Vec::new(),
            positions: BTreeMap::new(),
        };
        let units =
            NamedGroups::of(plan.parameters().iter().map(|parameter| parameter.info().unit()));
        let mut ragged: Vec<ragged::Unit<'_>> = vec![Vec::new(); units.names.len()];
        for (parameter, unit) in plan.parameters().iter().zip(units.of_item) {
            match (parameter.cut(), parameter.division()) {
                (Cut::Ragged { .. }, Division::Ragged(parts)) => {
                    if ragged[unit].is_empty() {
                        // Measured below, unit by unit, but sent in the order of the parameters.
                        tally.message(Kind::Sharded, parameter.info(), parameter.info().unit());
                    }
                    ragged[unit].push((parameter.info(), parts));
                }
                (_, division) => tally.add(parameter, division),
            }
        }
        ragged.retain(|unit| !unit.is_empty());
        let shares = ragged::measure(&ragged, plan.shares(), model, &mut tally.loads);
        for (unit, largest) in ragged.iter().zip(shares) {
            tally.add_ragged_unit(unit, largest);
        }
        tally
    }

    fn group(&self) -> WorldSize {
        self.shares.group()
    }

    fn add(&mut self, parameter: &'a PlannedParameter, division: Division) {
        let info = parameter.info();
        match division {
            Division::Chunks(chunks) => self.add_chunks(info, parameter.cut(), chunks),
            Division::Ragged(parts) => self.add_wrapped(info, parts),
            Division::Whole { owner, numel } => {
                self.loads.add_one(owner, Pricing::of(self.model, info).piece(numel));
                self.add_owner(info, owner);
                self.add_bytes(Kind::Owned, info, info.layer(), numel.into());
            }
            Division::Replicated { numel } => {
                let load = Pricing::of(self.model, info).piece(numel);
                self.loads.add_all(load);
                self.add_bytes(Kind::Replicated, info, info.unit(), numel.into());
            }
            Division::Nothing => {}
        }
    }

    fn add_chunks(&mut self, info: &'a ParameterInfo, cut: Cut, chunks: Chunks) {
        let group = self.group();
        let pricing = Pricing::of(self.model, info);
        for (members, numel) in chunks.runs(group) {
            let load = match cut {
                // The unit is one tensor, which the first parameter stands for.
                Cut::Flat { .. } => Load { owned: pricing.piece(numel).owned, ..Load::default() },
                Cut::Dim0
                | Cut::FlatAligned { .. }
                | Cut::Ragged { .. }
                | Cut::Wrapped { .. }
                | Cut::Whole { .. }
                | Cut::Replicated
                | Cut::Tied => Load { stored: 0, ..pricing.piece(numel) },
            };
            self.loads.add_run(members, load);
        }
        if !chunks.is_first() {
            return;
        }
        let chunk_numel = chunks.chunk_numel(group);
        let mut padded = Load { owned: 0, ..pricing.piece(chunk_numel) };
        if !matches!(cut, Cut::Flat { .. }) {
            padded = Load { grad: 0, optimizer: 0, ..padded };
        }
        self.loads.add_all(padded);
        if cut == Cut::Dim0 {
            self.add_states_of_empty_shards(chunks, pricing);
        }
        let buffer_numel = u128::from(chunk_numel) * u128::from(group.as_u64());
        self.add_bytes(Kind::Sharded, info, info.unit(), buffer_numel);
    }

    /// `fully_shard` gives the optimizer a tensor on every rank, also where that has no rows.
    fn add_states_of_empty_shards(&mut self, chunks: Chunks, pricing: Pricing) {
        #[expect(clippy::expect_used, reason = "a division without elements is `Nothing`")]
        let n_owners =
            chunks.runs(self.group()).map(|(members, _)| members.end).max().expect("rows");
        self.loads.add_run(n_owners..self.group().as_u64(), pricing.piece(0));
    }

    fn add_wrapped(&mut self, info: &'a ParameterInfo, parts: Ragged) {
        let pricing = Pricing::of(self.model, info);
        for (owner, part) in parts.parts(self.shares, 0..info.numel()) {
            self.loads.add_one(owner, pricing.piece(part.end - part.start));
            self.add_owner(info, owner);
        }
        self.add_bytes(Kind::Owned, info, info.layer(), info.numel().into());
    }

    /// Counts a call for what `owner` sends of the layer of `info`, unless it sent of it just
    /// before.
    fn add_owner(&mut self, info: &'a ParameterInfo, owner: u64) {
        let message = self.message(Kind::Owned, info, info.layer());
        if message.last_owner != Some(owner) {
            message.calls += u64::from(message.last_owner.is_some());
            message.last_owner = Some(owner);
        }
    }

    /// Counts what was measured of a unit: the room for its largest share, and what travels.
    fn add_ragged_unit(&mut self, unit: &[(&'a ParameterInfo, Ragged)], largest: Share) {
        self.loads.add_all(Load { stored: largest.stored, ..Load::default() });
        if let Some(&(info, _)) = unit.first() {
            let members = u128::from(self.group().as_u64());
            let message = self.message(Kind::Sharded, info, info.unit());
            message.gather_bytes += largest.gather * members;
            message.reduce_bytes += largest.reduce * members;
        }
    }

    /// Lengthens the message of `info` by `numel` elements.
    fn add_bytes(&mut self, kind: Kind, info: &'a ParameterInfo, name: &'a str, numel: u128) {
        let pricing = Pricing::of(self.model, info);
        let message = self.message(kind, info, name);
        message.gather_bytes += pricing.gather.bytes(numel);
        message.reduce_bytes += pricing.reduced_bytes(numel);
    }

    fn message(&mut self, kind: Kind, info: &'a ParameterInfo, name: &'a str) -> &mut Message<'a> {
        let next = self.messages.len();
        let position = *self.positions.entry((kind, name)).or_insert(next);
        if position == next {
            let unit = info.unit();
            self.messages.push(Message {
                kind,
                unit,
                calls: 1,
                gather_bytes: 0,
                reduce_bytes: 0,
                last_owner: None,
            });
        }
        &mut self.messages[position]
    }
}
