//! Layouts of a model on the devices. Only this module distinguishes them.

use std::sync::Arc;

use candle_core::{Result as CandleResult, Tensor};
use candle_nn::Optimizer;
use dist_checkpoint::TensorInfo;
use pmap_mesh::{DeviceMesh, Replica};

use crate::{
    error::Result,
    model::{
        builder::LendUnits,
        pass::{BatchOutcome, ShardLossFn},
        replicated::{Replicated, ReplicatedPass},
        sharded::{Sharded, ShardedPass, build::check_replicas_equal},
        slot::{SharedSlot, SlotVar, lock},
    },
    sharded::runs,
    step::{inventory::Inventory, rules::Rules},
    units::model::Model,
};

/// The layout of a model on the devices. For a third layout, add a variant and follow the compiler.
#[derive(Debug)]
pub(crate) enum Layout<M> {
    /// Every device has the full model.
    Replicated(Replicated<M>),
    /// Every slot has a shard.
    Sharded(Sharded, LendUnits<M>),
}

/// A batch in progress on the slots.
pub(crate) enum Pass<'a, M, O> {
    Replicated(ReplicatedPass<'a, M, O>),
    Sharded(ShardedPass<'a, O>, LendUnits<M>),
}

impl<M> Layout<M> {
    /// Starts a batch.
    ///
    /// # Errors
    ///
    /// Returns [`TrainingError::Option`](crate::TrainingError::Option) if the batch is to be
    /// accumulated but optimizers run in the backward pass, and the errors of candle.
    pub(crate) fn begin<'a, O>(
        &'a self,
        slots: &'a [SharedSlot<O>],
        rules: Rules,
    ) -> Result<Pass<'a, M, O>> {
        Ok(match self {
            Self::Replicated(layout) => Pass::Replicated(ReplicatedPass::new(layout, slots, rules)),
            Self::Sharded(layout, lend) => {
                Pass::Sharded(ShardedPass::new(layout, slots, rules)?, *lend)
            }
        })
    }

    /// Returns a full parameter by index, on this process's first device.
    pub(crate) fn parameter<O>(
        &self,
        inventory: &Inventory,
        slots: &[SharedSlot<O>],
        param: usize,
    ) -> Result<Tensor> {
        match self {
            // Shares memory with the trained variable.
            Self::Replicated(_) => Ok(lock(&slots[0]).vars[param].var.as_detached_tensor()),
            Self::Sharded(layout, _) => layout.model.vars.gather(inventory.name(param)),
        }
    }

    /// Describes the parameters as in a file.
    pub(crate) fn infos<O>(
        &self,
        inventory: &Inventory,
        slots: &[SharedSlot<O>],
    ) -> Result<Vec<TensorInfo>> {
        match self {
            Self::Replicated(_) => {
                let names = inventory.parameters.iter().map(|(name, _)| name);
                let slot = lock(&slots[0]);
                let info = |(name, var): (&String, &SlotVar)| TensorInfo::new(name, &var.var);
                Ok(names.zip(&slot.vars).map(info).collect())
            }
            Self::Sharded(layout, _) => {
                let parameters = layout.model.vars.plan().parameters();
                Ok(parameters
                    .iter()
                    .map(|planned| runs::tensor_info(planned.info()))
                    .collect::<Result<_, _>>()?)
            }
        }
    }

    /// Checks that values stored by several slots are the same to the bit.
    pub(crate) fn check_in_sync<O>(
        &self,
        mesh: &DeviceMesh,
        inventory: &Inventory,
        slots: &[SharedSlot<O>],
    ) -> Result<()> {
        match self {
            Self::Replicated(layout) => layout.check_in_sync(mesh, inventory, slots),
            Self::Sharded(layout, _) => check_replicas_equal(mesh, &layout.model),
        }
    }

    /// Drops accumulated gradients.
    pub(crate) fn discard_accumulated(&self) {
        match self {
            Self::Replicated(layout) => layout.discard_accumulated(),
            Self::Sharded(layout, _) => layout.discard_accumulated(),
        }
    }

    /// Returns the model of units if it is sharded.
    pub(crate) fn sharded(&self) -> Option<&Arc<Model>> {
        match self {
            Self::Replicated(_) => None,
            Self::Sharded(layout, _) => Some(&layout.model),
        }
    }
}

impl<M, O: Optimizer + Send + 'static> Pass<'_, M, O> {
    /// Computes a replica's shard of the batch. Returns `None` if all replicas reject it.
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

    /// Ends the batch: keeps the state for later batches, or reverts partial changes after an
    /// error.
    pub(crate) fn end(&self, is_ok: bool) -> Result<()> {
        match self {
            Self::Replicated(pass) => pass.end(is_ok),
            Self::Sharded(pass, _) => {
                pass.end(is_ok);
                Ok(())
            }
        }
    }

    /// Returns the full gradients of all trained parameters, after a batch with
    /// [`Goal::Differentiate`](crate::step::rules::Goal::Differentiate). Every process of the mesh
    /// must call this.
    pub(crate) fn gradients(&self) -> Result<Vec<Option<Tensor>>> {
        match self {
            Self::Replicated(pass) => Ok(pass.gradients()),
            Self::Sharded(pass, _) => pass.gradients(),
        }
    }
}
