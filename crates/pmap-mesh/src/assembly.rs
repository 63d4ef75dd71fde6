//! Parts of parameters put together from pieces that lie otherwise: from whole tensors, files, or another plan's parts.

use candle_core::{Device, Tensor, Var};
use fsdp_plan::ShardingPlan;

use crate::{
    engine::on_host,
    error::{Error, Result},
    mesh::DeviceMesh,
    placement::dtype_of,
    sharded_vars::{Part, ranks, runs_of},
};

/// The parts that the slots of a mesh are to keep, while their items arrive.
pub(crate) struct Assembly {
    /// For each parameter the parts that all slots keep of it.
    targets: Vec<Vec<Target>>,
}

struct Target {
    slot: usize,
    start: usize,
    /// On the processor, one-dimensional.
    items: Tensor,
    /// The runs that have arrived, in the parameter.
    arrived: Vec<(usize, usize)>,
}

impl Assembly {
    /// Empty parts for all slots.
    pub(crate) fn new(mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<Self> {
        if plan.world_size().as_usize() != mesh.len() {
            return Err(Error::PlanWorld { ranks: plan.world_size().as_u64(), slots: mesh.len() });
        }
        let targets = plan.parameters().iter().enumerate().map(|(param_idx, parameter)| {
            let dtype = dtype_of(parameter.info().dtype()).ok_or_else(|| {
                Error::Assemble(candle_core::Error::msg(format!("candle has no type {}", parameter.info().dtype())))
            })?;
            let mut targets = Vec::new();
            for (slot, rank) in ranks(plan.world_size()).enumerate() {
                for (start, len) in runs_of(plan, param_idx, rank)? {
                    let items = Tensor::zeros(len, dtype, &Device::Cpu).map_err(Error::Assemble)?;
                    targets.push(Target { slot, start, items, arrived: Vec::new() });
                }
            }
            Ok(targets)
        });
        Ok(Self { targets: targets.collect::<Result<_>>()? })
    }

    /// Takes what it needs of a run of a parameter's items, given as a tensor of one dimension.
    pub(crate) fn add(&mut self, param_idx: usize, start: usize, items: &Tensor) -> Result<()> {
        let end = start + items.elem_count();
        let items = on_host(items).map_err(Error::Assemble)?;
        for target in &mut self.targets[param_idx] {
            let overlap = start.max(target.start)..end.min(target.start + target.items.elem_count());
            if overlap.is_empty() {
                continue;
            }
            let copy = || {
                let piece = items.narrow(0, overlap.start - start, overlap.len())?;
                target.items.slice_set(&piece, 0, overlap.start - target.start)
            };
            copy().map_err(Error::Assemble)?;
            target.arrived.push((overlap.start, overlap.end));
        }
        Ok(())
    }

    /// The parts as variables on the devices of their slots, in the order of the plan.
    pub(crate) fn finish(self, plan: &ShardingPlan, devices: &[Device]) -> Result<Vec<Vec<Part>>> {
        let mut slots: Vec<Vec<Part>> = devices.iter().map(|_| Vec::new()).collect();
        for (param_idx, targets) in self.targets.into_iter().enumerate() {
            for target in targets {
                if let Some(missing) = target.first_missing() {
                    let name = plan.parameters()[param_idx].info().name().to_owned();
                    return Err(Error::Incomplete { name, missing });
                }
                let there = target.items.to_device(&devices[target.slot]);
                let var = there.and_then(|items| Var::from_tensor(&items)).map_err(Error::Assemble)?;
                slots[target.slot].push(Part { param_idx, start: target.start, var });
            }
        }
        Ok(slots)
    }
}

impl Target {
    /// The first item that has not arrived.
    fn first_missing(&self) -> Option<usize> {
        let mut arrived = self.arrived.clone();
        arrived.sort_unstable();
        let reached = arrived.iter().fold(
            self.start,
            |reached, &(start, end)| {
                if start <= reached { reached.max(end) } else { reached }
            },
        );
        (reached < self.start + self.items.elem_count()).then_some(reached)
    }
}
