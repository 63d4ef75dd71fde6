//! One pass over a plan that adds up the bytes of members and of transfers.

use std::collections::BTreeMap;

use core_types::WorldSize;

use super::{
    CostModel,
    member_bytes::{MemberBytes, MemberTotals, ParameterDtypes},
    ragged::{self, RaggedShare},
};
use crate::{
    cut::{ChunkedCut, Cut, PreparedCut},
    param::{ParameterInfo, groups::NamedGroups},
    plan::ShardingPlan,
};

/// The units of a pass, each with the indices of its parameters.
pub(super) struct UnitMembers<'a>(pub(super) Vec<(&'a str, Vec<usize>)>);

impl<'a> UnitMembers<'a> {
    /// Returns the units of a plan in order of first occurrence.
    pub(super) fn from_plan(plan: &'a ShardingPlan) -> Self {
        let names = plan.parameters().iter().map(|parameter| parameter.info().unit());
        let groups = NamedGroups::from_names(names);
        let mut units: Vec<_> = groups.names.into_iter().map(|name| (name, Vec::new())).collect();
        for (position, unit) in groups.group_of_item.into_iter().enumerate() {
            units[unit].1.push(position);
        }
        Self(units)
    }
}

/// The result of a pass over a plan.
pub(super) struct PlanTally<'a> {
    model: CostModel,
    group: WorldSize,
    /// Bytes of the members. A parameter counts once per unit that contains it.
    totals: MemberTotals,
    pub(super) units: Vec<UnitTally<'a>>,
    /// Bytes of the largest unreduced gradient of a parameter.
    pub(super) largest_grad_bytes: u128,
}

/// The transfers of a unit.
#[derive(Debug, Default)]
pub(super) struct UnitTally<'a> {
    pub(super) name: &'a str,
    /// Parameters gathered in a shard group.
    pub(super) gathered: CallBuffer,
    /// Gradients of the gathered parameters.
    pub(super) reduced: CallBuffer,
    /// Gradients of replicated parameters.
    pub(super) copies: CallBuffer,
    /// Bytes of replicated parameters.
    pub(super) replicated_bytes: u128,
}

/// Parameters or gradients that one call transfers.
#[derive(Debug, Default)]
pub(super) struct CallBuffer {
    pub(super) parameters: Vec<usize>,
    pub(super) payload_bytes: u128,
    /// Bytes of parts that are equal on all members, padding included.
    even_bytes: u128,
    /// Further bytes of single members.
    owner_bytes: BTreeMap<u64, u128>,
}

impl CallBuffer {
    /// Returns the bytes of all parts, padding included.
    pub(super) fn bytes(&self) -> u128 {
        self.even_bytes + self.owner_bytes.values().sum::<u128>()
    }

    /// Returns a call in which every member has the largest member's part: a sum of parts over the
    /// replicas.
    pub(super) fn sum_of_largest_parts(&self, plan: &ShardingPlan) -> Self {
        let even = self.even_bytes / u128::from(plan.shard_group().as_u64());
        let bytes = even + self.owner_bytes.values().fold(0, |most, &bytes| most.max(bytes));
        let parameters = self.parameters.clone();
        Self { parameters, payload_bytes: bytes, even_bytes: bytes, ..Self::default() }
    }

    /// Returns a lower bound of the smallest member's part, with or without padding.
    pub(super) fn smallest_part_bytes(&self, plan: &ShardingPlan, is_padded: bool) -> u128 {
        let members = u128::from(plan.shard_group().as_u64());
        let chunk = self.even_bytes / members;
        let owned: u128 = self.owner_bytes.values().sum();
        // The last member has the remainder if all others have full chunks.
        let remainder = (self.payload_bytes - owned).saturating_sub((members - 1) * chunk);
        let even = if is_padded { chunk } else { remainder };
        if (self.owner_bytes.len() as u128) < members {
            return even; // some member owns nothing
        }
        even + self.owner_bytes.values().fold(u128::MAX, |least, &bytes| least.min(bytes))
    }

    /// Adds a parameter without padding.
    fn add_payload(&mut self, position: usize, bytes: u128) {
        self.parameters.push(position);
        self.payload_bytes += bytes;
    }
}

impl<'a> PlanTally<'a> {
    /// Adds up the bytes of `units`.
    pub(super) fn new(plan: &'a ShardingPlan, model: &CostModel, units: &UnitMembers<'a>) -> Self {
        let mut tally = Self {
            model: *model,
            group: plan.shard_group(),
            totals: MemberTotals::new(plan.shard_group()),
            units: Vec::with_capacity(units.0.len()),
            largest_grad_bytes: 0,
        };
        let mut ragged = ragged::RaggedTally::new(plan.shard_group());
        for (name, members) in &units.0 {
            let unit = tally.add_unit(plan, name, members, &mut ragged);
            tally.units.push(unit);
        }
        ragged.add_middles(&mut tally.totals);
        tally
    }

    /// Returns the bytes that each member holds while no step runs.
    pub(super) fn members(&self) -> impl Iterator<Item = MemberBytes> + Clone {
        let pads = self.model.pads();
        self.totals.per_member().map(move |member| {
            let storage = if pads { member.storage } else { member.param };
            MemberBytes { storage, ..member }
        })
    }

    /// Adds the bytes of one unit.
    fn add_unit(
        &mut self,
        plan: &'a ShardingPlan,
        name: &'a str,
        members: &[usize],
        ragged: &mut ragged::RaggedTally,
    ) -> UnitTally<'a> {
        let mut unit = UnitTally { name, ..UnitTally::default() };
        let mut ragged_parts: ragged::RaggedUnit<'_> = Vec::new();
        for &position in members {
            let parameter = &plan.parameters()[position];
            let info = parameter.info();
            let prepared_cut = parameter.prepared_cut();
            self.add_payload(&mut unit, position, info, &prepared_cut);
            match (parameter.cut(), prepared_cut) {
                // The largest share is that of the whole unit, so its parameters are measured together.
                (Cut::Ragged { .. }, PreparedCut::Ragged(parts)) => {
                    ragged_parts.push((info, parts));
                }
                (_, prepared_cut) => self.add(&mut unit, info, parameter.cut(), prepared_cut),
            }
        }
        if !ragged_parts.is_empty() {
            let largest = ragged.measure(&ragged_parts, self.group, &self.model, &mut self.totals);
            self.add_ragged(&mut unit, largest);
        }
        unit
    }

    /// Adds a parameter, without padding, to the calls that send it and its gradient.
    fn add_payload(
        &mut self,
        unit: &mut UnitTally<'_>,
        position: usize,
        info: &ParameterInfo,
        prepared_cut: &PreparedCut,
    ) {
        let dtypes = ParameterDtypes::new(&self.model, info);
        let param_bytes = dtypes.gather.rounded_up_bytes(info.numel().into());
        let grad_bytes = dtypes.reduced_bytes(info.numel().into());
        let reduced = match prepared_cut {
            PreparedCut::Nothing => return,
            PreparedCut::Replicated { .. } => {
                unit.replicated_bytes += param_bytes;
                &mut unit.copies
            }
            PreparedCut::Chunks(_) | PreparedCut::Ragged(_) | PreparedCut::Whole { .. } => {
                unit.gathered.add_payload(position, param_bytes);
                &mut unit.reduced
            }
        };
        if info.requires_grad() {
            reduced.add_payload(position, grad_bytes);
            self.largest_grad_bytes = self.largest_grad_bytes.max(grad_bytes);
        }
    }

    /// Adds the bytes of a parameter, with padding, to its members and calls.
    fn add(
        &mut self,
        unit: &mut UnitTally<'_>,
        info: &ParameterInfo,
        cut: Cut,
        prepared_cut: PreparedCut,
    ) {
        let dtypes = ParameterDtypes::new(&self.model, info);
        match prepared_cut {
            PreparedCut::Chunks(chunks) => self.add_chunks(unit, dtypes, cut, chunks),
            PreparedCut::Ragged(parts) => {
                for (owner, part) in parts.parts(self.group, 0..info.numel()) {
                    self.add_owned(unit, dtypes, owner, part.end - part.start);
                }
            }
            PreparedCut::Whole { owner, numel } => self.add_owned(unit, dtypes, owner, numel),
            PreparedCut::Replicated { numel } => {
                self.totals.add_all(dtypes.member_bytes(numel));
                unit.copies.even_bytes += dtypes.reduced_bytes(numel.into());
            }
            PreparedCut::Nothing => {}
        }
    }

    /// Adds a part that one member owns.
    fn add_owned(
        &mut self,
        unit: &mut UnitTally<'_>,
        dtypes: ParameterDtypes,
        owner: u64,
        numel: u64,
    ) {
        self.totals.add_one(owner, dtypes.member_bytes(numel));
        let gathered = unit.gathered.owner_bytes.entry(owner).or_default();
        *gathered += dtypes.gather.rounded_up_bytes(numel.into());
        let reduced = unit.reduced.owner_bytes.entry(owner).or_default();
        *reduced += dtypes.reduced_bytes(numel.into());
    }

    /// Adds a parameter that is cut into chunks: dim 0, or a part of a flat unit.
    fn add_chunks(
        &mut self,
        unit: &mut UnitTally<'_>,
        dtypes: ParameterDtypes,
        cut: Cut,
        chunks: ChunkedCut,
    ) {
        // FSDP1 stores a flat unit as one padded tensor, which is counted with its first parameter.
        // So its other parameters add nothing but their elements.
        let is_flat_tensor = matches!(cut, Cut::Flat { .. }) && self.model.pads();
        for (members, numel) in chunks.runs(self.group) {
            let bytes = dtypes.member_bytes(numel);
            let own = if is_flat_tensor { bytes.only_param() } else { bytes.without_storage() };
            self.totals.add_run(members, own);
        }
        if !chunks.is_first() {
            return;
        }
        let chunk_numel = chunks.chunk_numel(self.group);
        let chunk = dtypes.member_bytes(chunk_numel);
        // The padding of a flat tensor has gradients and optimizer state, the padding of dim 0 has not.
        self.totals.add_all(if is_flat_tensor {
            chunk.without_param()
        } else {
            chunk.only_storage()
        });
        if cut == Cut::Dim0 && self.model.pads() {
            self.add_states_of_empty_shards(chunks, dtypes);
        }
        let buffer_numel = u128::from(chunk_numel) * u128::from(self.group.as_u64());
        unit.gathered.even_bytes += dtypes.gather.rounded_up_bytes(buffer_numel);
        unit.reduced.even_bytes += dtypes.reduced_bytes(buffer_numel);
    }

    /// Adds the optimizer state of members without rows: `fully_shard` gives the optimizer a tensor on
    /// every rank.
    fn add_states_of_empty_shards(&mut self, chunks: ChunkedCut, dtypes: ParameterDtypes) {
        #[expect(clippy::expect_used, reason = "a cut without elements is `Nothing`")]
        let n_owners = chunks.runs(self.group).map(|(members, _)| members.end).max().expect("rows");
        self.totals.add_run(n_owners..self.group.as_u64(), dtypes.member_bytes(0));
    }

    /// Adds a ragged unit, of which every member stores and sends as much as the largest share.
    fn add_ragged(&mut self, unit: &mut UnitTally<'_>, largest: RaggedShare) {
        let RaggedShare { stored, gather, reduce } = largest;
        self.totals.add_all(MemberBytes::storage(stored));
        let members = u128::from(self.group.as_u64());
        unit.gathered.even_bytes += gather * members;
        unit.reduced.even_bytes += reduce * members;
    }
}
