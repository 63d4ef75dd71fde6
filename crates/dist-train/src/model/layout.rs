//! How a model lies on the devices. The only module that tells the layouts apart.

use std::sync::Arc;

use candle_core::{Result as CandleResult, Tensor};
use candle_nn::Optimizer;
use fsdp_plan::ParameterInfo;
use pmap_mesh::{DeviceMesh, Replica};

use crate::{
    error::Result,
    model::{
        builder::LendUnits,
        pass::{BatchOutcome, ShardLossFn},
        replicated::{Replicated, ReplicatedPass},
        sharded::{Sharded, ShardedPass},
        slot::{SharedSlot, lock},
    },
    parameters::describe::parameter_infos,
    step::{inventory::Inventory, rules::Rules},
    units::model::Model,
};

/// How a model lies on the devices. A third way is a third variant, after which the compiler names
/// the places that must know it.
#[derive(Debug)]
pub(crate) enum Layout<M> {
    /// Every device has all of it.
    Replicated(Replicated<M>),
    /// Every slot has its part.
    Sharded(Sharded, LendUnits<M>),
}

/// A batch on its way through the slots.
pub(crate) enum Pass<'a, M, O> {
    Replicated(ReplicatedPass<'a, M, O>),
    Sharded(ShardedPass<'a, O>, LendUnits<M>),
}

impl<M> Layout<M> {
    /// Begins a batch.
    ///
    /// # Errors
    ///
    /// [`TrainingError::NeedsAllGradients`](crate::TrainingError::NeedsAllGradients) if the batch is
    /// to be accumulated and optimizers run in the backward pass; if candle fails.
    pub(crate) fn begin<'a, O>(
        &'a self,
        slots: &'a [SharedSlot<O>],
        rules: Rules,
    ) -> Result<Pass<'a, M, O>> {
        Ok(match self {
            Self::Replicated(layout) => {
                Pass::Replicated(ReplicatedPass::new(layout, slots, rules)?)
            }
            Self::Sharded(layout, lend) => {
                Pass::Sharded(ShardedPass::new(layout, slots, rules)?, *lend)
            }
        })
    }

    /// Returns a whole parameter, given by its position, on this process's first device.
    pub(crate) fn parameter<O>(
        &self,
        inventory: &Inventory,
        slots: &[SharedSlot<O>],
        param: usize,
    ) -> Result<Tensor> {
        match self {
            // It shares the memory of what is trained.
            Self::Replicated(_) => Ok(lock(&slots[0]).vars[param].var.as_detached_tensor()),
            Self::Sharded(layout, _) => layout.model.vars.gather(inventory.name(param)),
        }
    }

    /// Describes the parameters, in the order in which they are saved.
    pub(crate) fn infos<O>(
        &self,
        inventory: &Inventory,
        slots: &[SharedSlot<O>],
    ) -> Result<Vec<ParameterInfo>> {
        match self {
            Self::Replicated(_) => {
                let slot = lock(&slots[0]);
                let names = inventory.parameters.iter().map(|(name, _)| name);
                parameter_infos(names.zip(slot.vars.iter().map(|var| var.var.as_tensor())))
            }
            Self::Sharded(layout, _) => {
                let parameters = layout.model.vars.plan().parameters();
                Ok(parameters.iter().map(|planned| planned.info().clone()).collect())
            }
        }
    }

    /// Checks that what several slots store of a parameter is the same to the bit.
    pub(crate) fn check_in_sync<O>(
        &self,
        mesh: &DeviceMesh,
        inventory: &Inventory,
        slots: &[SharedSlot<O>],
    ) -> Result<()> {
        match self {
            Self::Replicated(layout) => layout.check_in_sync(mesh, inventory, slots),
            Self::Sharded(layout, _) => layout.check_in_sync(mesh),
        }
    }

    /// Drops accumulated gradients.
    pub(crate) fn discard_accumulated(&self) {
        match self {
            Self::Replicated(layout) => layout.discard_accumulated(),
            Self::Sharded(layout, _) => layout.discard_accumulated(),
        }
    }

    /// Returns the model of units, if it is sharded.
    pub(crate) fn sharded(&self) -> Option<&Arc<Model>> {
        match self {
            Self::Replicated(_) => None,
            Self::Sharded(layout, _) => Some(&layout.model),
        }
    }
}

impl<M, O: Optimizer + Send + 'static> Pass<'_, M, O> {
    /// Computes a replica's part of the batch. Returns nothing where all replicas reject it.
    pub(crate) fn replica(
        &self,
        ctx: &Replica,
        loss: &mut ShardLossFn<'_, M>,
    ) -> CandleResult<Option<BatchOutcome>> {
        match self {
            Self::Replicated(pass) => pass.replica(ctx, loss),
            Self::Sharded(pass, lend) => {
                pass.replica(ctx, &mut |units, shard_use| loss(lend(units), shard_use))
            }
        }
    }

    pub(crate) fn rules(&self) -> &Rules {
        match self {
            Self::Replicated(pass) => &pass.rules,
            Self::Sharded(pass, _) => pass.rules(),
        }
    }

    /// Ends the batch: stores what a later one needs, or takes back what this one has changed.
    pub(crate) fn end(&self, is_ok: bool) -> Result<()> {
        match self {
            Self::Replicated(pass) => pass.end(is_ok),
            Self::Sharded(pass, _) => {
                pass.end(is_ok);
                Ok(())
            }
        }
    }

    /// Returns the whole gradients of all trained parameters, of a batch that was differentiated.
    /// Every process of the mesh calls it.
    pub(crate) fn gradients(&self) -> Result<Vec<Option<Tensor>>> {
        match self {
            Self::Replicated(pass) => Ok(pass.gradients()),
            Self::Sharded(pass, _) => pass.gradients(),
        }
    }
}
