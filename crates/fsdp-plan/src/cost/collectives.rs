//! What one training step sends, by kind of collective.

use std::collections::BTreeMap;

use core_types::WorldSize;
use serde::Serialize;

use super::CostModel;
use crate::{
    Cut, PlannedParameter, ShardingPlan,
    error::{Error, Result},
};

/// How often one kind of collective runs in a step, and how much it moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Traffic {
    /// The number of calls.
    pub count: u64,
    /// The bytes of the whole buffer, padding included, over all calls: what `all_gather` puts out, and what
    /// `reduce_scatter` takes in.
    pub bytes: u64,
}

/// The collectives of one step: one forward and one backward pass.
///
/// Units are gathered before the forward pass, and again before the backward pass because they are freed in between;
/// only the root unit stays, as in PyTorch's `fully_shard`. Gradients are reduced once per unit. Layers that are not
/// cut are broadcast by their owner and reduced to it in the same rhythm. Gradients of replicated parameters are
/// averaged by one `all_reduce` per unit. A world of one rank sends nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Collectives {
    /// Parameters that are cut, to every rank.
    pub all_gather: Traffic,
    /// Gradients of parameters that are cut, to their owners.
    pub reduce_scatter: Traffic,
    /// Gradients of replicated parameters, to every rank.
    pub all_reduce: Traffic,
    /// Parameters of whole layers, to every rank.
    pub broadcast: Traffic,
    /// Gradients of whole layers, to their owner.
    pub reduce: Traffic,
}

impl Collectives {
    pub(super) fn of(plan: &ShardingPlan, model: CostModel) -> Result<Self> {
        let mut collectives = Self::default();
        if plan.world_size() == WorldSize::ONE {
            return Ok(collectives);
        }
        for ((kind, ..), group) in groups(plan, model) {
            let (gather, reduce) = collectives.of_kind(kind);
            if let Some(gather) = gather {
                gather.add(group.gather_bytes, if group.is_root { 1 } else { 2 })?;
            }
            reduce.add(group.reduce_bytes, 1)?;
        }
        Ok(collectives)
    }

    /// The collectives that bring parameters of a kind, and that take their gradients away.
    fn of_kind(&mut self, kind: Kind) -> (Option<&mut Traffic>, &mut Traffic) {
        match kind {
            Kind::Cut => (Some(&mut self.all_gather), &mut self.reduce_scatter),
            Kind::Whole => (Some(&mut self.broadcast), &mut self.reduce),
            Kind::Replicated => (None, &mut self.all_reduce),
        }
    }
}

impl Traffic {
    /// Adds `count` calls that move `bytes` each, unless there is nothing to move.
    fn add(&mut self, bytes: u128, count: u64) -> Result<()> {
        let total = u128::from(self.bytes) + bytes * u128::from(count);
        self.bytes = u64::try_from(total).map_err(|_| Error::TotalTooLarge { what: "the bytes sent in a step" })?;
        self.count += if bytes > 0 { count } else { 0 };
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Cut,
    Whole,
    Replicated,
}

/// Parameters that travel in one message: those of a unit, or of a whole layer.
#[derive(Default)]
struct Group {
    gather_bytes: u128,
    reduce_bytes: u128,
    is_root: bool,
}

fn groups(plan: &ShardingPlan, model: CostModel) -> BTreeMap<(Kind, &str), Group> {
    let mut groups: BTreeMap<_, Group> = BTreeMap::new();
    for parameter in plan.parameters() {
        let info = parameter.info();
        let key = match parameter.cut() {
            Cut::Dim0 | Cut::Flat { .. } => (Kind::Cut, info.unit()),
            Cut::Whole { .. } => (Kind::Whole, info.layer()),
            Cut::Replicated => (Kind::Replicated, info.unit()),
        };
        let (gather_dtype, reduce_dtype) = model.wire_dtypes(info.dtype());
        let numel = buffer_numel(parameter, plan.world_size());
        let group = groups.entry(key).or_default();
        group.is_root = info.unit().is_empty();
        group.gather_bytes += gather_dtype.bytes(numel);
        group.reduce_bytes += if info.requires_grad() { reduce_dtype.bytes(numel) } else { 0 };
    }
    groups
}

/// The elements by which a parameter lengthens the buffer it travels in, padding for all ranks included.
fn buffer_numel(parameter: &PlannedParameter, world_size: WorldSize) -> u128 {
    let (info, cut) = (parameter.info(), parameter.cut());
    let Some(span) = cut.span(info) else { return info.numel().into() };
    let padded = u128::from(span.chunk_numel(world_size)) * u128::from(world_size.as_u64());
    // The first parameter of a flat unit stands for all of it.
    if span.is_first() && info.numel() > 0 { padded } else { 0 }
}
