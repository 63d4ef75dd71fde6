//! A sharded model as every replica knows it.

use std::{collections::BTreeMap, sync::Arc};

use candle_core::DType;
use fsdp_plan::ElemType;

use crate::{
    fsdp::keep::Keep, sharded::ShardedVars, step::inventory::Inventory, units::rules::Member,
};

/// A sharded model: the same on every slot but for the parts that each keeps.
#[derive(Debug)]
pub(crate) struct Model {
    pub(super) vars: ShardedVars,
    pub(super) units: BTreeMap<String, Unit>,
    pub(super) inventory: Arc<Inventory>,
    /// The type that builders have.
    pub(super) dtype: DType,
}

/// Parameters that are gathered together.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) members: Vec<UnitMember>,
    pub(super) keep: Keep,
}

/// A parameter of a unit.
#[derive(Debug)]
pub(super) struct UnitMember {
    pub(super) names: Member,
    pub(super) is_trained: bool,
}

impl Model {
    /// Whether a parameter is of half precision.
    pub(super) fn has_halves(&self) -> bool {
        let parameters = self.vars.plan().parameters();
        parameters
            .iter()
            .any(|parameter| matches!(parameter.info().dtype(), ElemType::F16 | ElemType::Bf16))
    }
}

impl Unit {
    pub(super) fn is_trained(&self) -> bool {
        self.members.iter().any(|member| member.is_trained)
    }
}
