//! Variables sharded by a plan: each slot stores its shards.

mod axes;
pub(crate) mod runs;
pub(crate) mod units;

use std::{collections::BTreeMap, ops::Range};

use candle_core::{DType, Device, Tensor, Var};
use dist_checkpoint::ParameterError;
use fsdp_plan::{Cut, ParameterInfo, ShardingPlan};
use pmap_mesh::DeviceMesh;

use self::{axes::PlanAxes, units::UnitCollectives};
use crate::{
    device::move_to_device,
    error::{Doing, Error, Result},
    precision::Precision,
};

/// The parameters of a model, sharded over the slots of a mesh by a plan.
///
/// A shard is a one-dimensional variable: a range of the parameter's items in row-major order. A
/// plan with replicas (HSDP) needs a mesh with one shard group as its last axis; the other axes are
/// the replicas.
#[derive(Debug)]
pub(crate) struct ShardedVars {
    plan: ShardingPlan,
    mesh: DeviceMesh,
    axes: PlanAxes,
    precision: Precision,
    units: BTreeMap<String, UnitCollectives>,
    /// The shards of each slot of this process, in plan order.
    slots: Vec<Vec<ShardVar>>,
}

/// A contiguous shard of a parameter on one slot.
#[derive(Clone, Debug)]
pub(crate) struct ShardVar {
    /// The index of the parameter in the plan.
    pub(crate) param_idx: usize,
    /// The index of the first item in the parameter.
    pub(crate) start: usize,
    pub(crate) var: Var,
    /// Whether this slot is the first that stores this shard.
    pub(crate) is_primary: bool,
}

impl ShardedVars {
    /// Creates the variables of this process's slots. `units` are the units with the names of their
    /// parameters; a parameter may be in several units. Parameters are gathered and gradients are
    /// reduced in the dtypes of `precision`.
    ///
    /// `source` returns the initial items in a range of a parameter as a one-dimensional tensor.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Sharding`] if the plan's ranks or replicas do not fit the mesh,
    /// the errors of `source`, and [`Error::Tensor`] if candle fails.
    pub(crate) fn new<'a, N: Iterator<Item = &'a str>>(
        mesh: &DeviceMesh,
        plan: ShardingPlan,
        units: impl Iterator<Item = (&'a String, N)>,
        precision: Precision,
        source: impl Fn(&ParameterInfo, Range<usize>) -> Result<Tensor>,
    ) -> Result<Self> {
        let axes = axes::for_plan(mesh, &plan)?;
        let mut slots: Vec<Vec<ShardVar>> = mesh.devices().iter().map(|_| Vec::new()).collect();
        for (param_idx, parameter) in plan.parameters().iter().enumerate() {
            let info = parameter.info();
            let n_primary = match parameter.cut() {
                Cut::Replicated => 1,
                _ => plan.shard_group().as_usize(),
            };
            let ranks_here = runs::ranks(plan.world_size()).skip(mesh.local_slots().start);
            for ((rank, shards), device) in ranks_here.zip(&mut slots).zip(mesh.devices()) {
                for run in runs::rank_runs(&plan, param_idx, rank)? {
                    let start = run.start;
                    let var = variable(&source(info, run)?, device)?;
                    let is_primary = rank.as_usize() < n_primary;
                    shards.push(ShardVar { param_idx, start, var, is_primary });
                }
            }
        }
        let units = units::from_names(&plan, units, precision)?;
        Ok(Self { plan, mesh: mesh.clone(), axes, precision, units, slots })
    }

    /// Returns the plan.
    pub(crate) fn plan(&self) -> &ShardingPlan {
        &self.plan
    }

    /// Returns the shards of a slot of this process, in plan order.
    pub(crate) fn shards(&self, slot: usize) -> &[ShardVar] {
        &self.slots[slot - self.mesh.local_slots().start]
    }

    fn info(&self, param_idx: usize) -> &ParameterInfo {
        self.plan.parameters()[param_idx].info()
    }

    /// Gathers a full parameter on this process's first device.
    ///
    /// On a mesh of several processes, all processes must call this.
    ///
    /// # Errors
    ///
    /// Returns [`ParameterError::Unknown`], [`Error::Tensor`] if candle fails, or [`Error::Mesh`]
    /// if a process does not respond.
    pub(crate) fn gather(&self, name: &str) -> Result<Tensor> {
        self.gather_with(name, |local_slot, shard_idx| {
            Some(self.slots[local_slot][shard_idx].var.as_detached_tensor())
        })
    }

    /// Gathers a full tensor from values for the shards of a parameter. `value` is called with the
    /// index of each slot in this process and the index of each shard on the slot.
    ///
    /// # Errors
    ///
    /// Returns [`ParameterError::Missing`] if a shard has no value, and the errors of
    /// [`gather`](Self::gather).
    pub(crate) fn gather_with(
        &self,
        name: &str,
        value: impl Fn(usize, usize) -> Option<Tensor>,
    ) -> Result<Tensor> {
        let param_idx = units::index_of(&self.plan, name)?;
        let missing = || ParameterError::Missing { name: name.to_owned() };
        let mut local_values = vec![Vec::new(); self.slots.len()];
        for (local_slot, shards) in self.slots.iter().enumerate() {
            for (shard_idx, shard) in shards.iter().enumerate() {
                if shard.param_idx == param_idx {
                    let shard_value = value(local_slot, shard_idx).ok_or_else(missing)?;
                    local_values[local_slot].push(shard_value);
                }
            }
        }
        let values_by_slot = self.mesh.process_allgather(local_values)?;
        let mut by_start = BTreeMap::new();
        // `zip` ends with the first shard group, since the other groups hold the same shards.
        // Copies of a replicated parameter have the same start, so the map keeps one of them.
        for (rank, values) in runs::ranks(self.plan.shard_group()).zip(values_by_slot) {
            let runs = runs::rank_runs(&self.plan, param_idx, rank)?;
            by_start.extend(runs.into_iter().map(|run| run.start).zip(values));
        }
        let device = &self.mesh.devices()[0];
        let moved: candle_core::Result<Vec<_>> =
            by_start.values().map(|shard| move_to_device(shard, device)).collect();
        let shards = moved.doing("moving the shards of a parameter")?;
        self.join(param_idx, &shards, device)
    }

    fn dtype(&self, param_idx: usize) -> Result<DType> {
        Ok(runs::dtype(self.info(param_idx))?)
    }

    /// Joins the shards of a parameter, in order.
    fn join(&self, param_idx: usize, shards: &[Tensor], device: &Device) -> Result<Tensor> {
        let shape = runs::shape(self.info(param_idx));
        let result = match shards {
            [] => Tensor::zeros(shape, self.dtype(param_idx)?, device),
            [only] => only.reshape(shape),
            shards => Tensor::cat(shards, 0).and_then(|items| items.reshape(shape)),
        };
        result.doing("joining the shards of a parameter")
    }
}

fn unknown(name: &str) -> Error {
    ParameterError::Unknown { name: name.to_owned() }.into()
}

/// Copies a range of a parameter's items into a variable.
fn variable(items: &Tensor, device: &Device) -> Result<Var> {
    items
        .force_contiguous()
        .and_then(|items| Var::from_tensor(&move_to_device(&items, device)?))
        .doing("moving a shard of a parameter")
}
