//! Saving and loading a sharded model in training.

use candle_core::{Tensor, Var};
use dist_checkpoint::{Checkpoint, StateDict, TensorKey};

use crate::{
    device::moved,
    error::{Doing, Result},
    fsdp::{
        FullyShard, lock,
        slot::{Part, Slot},
    },
    optim::{StatefulOptimizer, add_state, load_state},
    progress::{Progress, TrainerState},
    step::inventory::Inventory,
};

impl<O: StatefulOptimizer> FullyShard<O> {
    /// The parameters, what the optimizers keep for them, and how far training is, for
    /// [`Checkpoints::save`](crate::Checkpoints::save): each slot of the mesh, in whatever process,
    /// writes its parts. Accumulated gradients are not among them. Every process of the mesh calls
    /// it.
    ///
    /// # Errors
    ///
    /// [`TrainingError::HalfUpdated`](crate::TrainingError::HalfUpdated) after a step that failed
    /// on its way, [`Error::Optimizer`](crate::Error::Optimizer) if an optimizer cannot tell its
    /// state, [`CheckpointError::Kind`](crate::CheckpointError::Kind) if its state has a name that
    /// cannot be written, [`Error::OtherProcess`](crate::Error::OtherProcess) if another process
    /// fails.
    pub fn state_dict(&self) -> Result<StateDict> {
        self.check_whole()?;
        self.mesh.all_ok(self.state_of_slots())
    }

    /// What the slots of this process keep.
    fn state_of_slots(&self) -> Result<StateDict> {
        let inventory = &self.model.inventory;
        let mut state = StateDict::new(&self.mesh, inventory.saved_shapes())
            .with_trainer(&self.rates.state(self.progress))?;
        for (local_slot, slot) in self.slots.iter().enumerate() {
            let slot = lock(slot);
            let is_saved = |part: &Part| part.is_primary && inventory.roles.is_saved(part.param);
            for (position, part) in slot.parts.iter().enumerate().filter(|(_, part)| is_saved(part))
            {
                let key = key(inventory, part);
                state.add(local_slot, key, part.var.as_detached_tensor())?;
                if let Some((optimizer, position)) = slot.optimizer_of(position) {
                    add_state(&mut state, local_slot, key, optimizer, position)?;
                }
            }
        }
        Ok(state)
    }

    /// Gives all parameters and optimizers the values of a checkpoint, whatever number of slots and
    /// plan it was written under, [`DataParallel`](crate::DataParallel)'s among them, and resumes
    /// its count of steps, random numbers and learning rates; accumulated gradients are dropped.
    /// Every slot reads its own items. Every process of the mesh calls this, with the same
    /// checkpoint.
    ///
    /// # Errors
    ///
    /// Those of [`DataParallel::load`](crate::DataParallel::load).
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.check_fits(&self.mesh, &self.model.inventory.saved_shapes())?;
        let trainer = checkpoint.trainer::<TrainerState>()?;
        let rates = match &trainer {
            Some(state) => self.rates.resumed(state)?,
            None => self.rates.clone(),
        };
        self.mesh.all_ok(self.load_slots(checkpoint))?;
        self.slots.iter().for_each(|slot| lock(slot).is_half_updated = false);
        self.rates = rates;
        self.resume(checkpoint.step(), trainer);
        Ok(())
    }

    /// Gives the parts and optimizers of this process their values.
    fn load_slots(&self, checkpoint: &Checkpoint) -> Result<()> {
        let inventory = &self.model.inventory;
        // On all slots before the first is read: some would go on with what the others have dropped.
        // One that fails on its way has given some parameters their values and others not.
        self.slots.iter().for_each(|slot| {
            let slot = &mut *lock(slot);
            slot.forget();
            slot.is_half_updated = true;
        });
        for slot in &self.slots {
            let slot = &mut *lock(slot);
            for part in slot.parts.iter().filter(|part| inventory.roles.is_saved(part.param)) {
                let value = checkpoint.like(key(inventory, part), &part.var)?;
                assign(&part.var, &value).doing("loading a parameter")?;
            }
            load_optimizers(slot, inventory, checkpoint)?;
        }
        Ok(())
    }

    /// Resumes the count of steps and of random numbers.
    fn resume(&mut self, step: u64, trainer: Option<TrainerState>) {
        self.progress = match trainer {
            Some(state) => state.progress,
            None => Progress { steps: step, batches: step, ..self.progress },
        };
    }
}

fn load_optimizers<O: StatefulOptimizer>(
    slot: &mut Slot<O>,
    inventory: &Inventory,
    checkpoint: &Checkpoint,
) -> Result<()> {
    for of_parts in &mut slot.optimizers {
        for (position, &part) in of_parts.parts.iter().enumerate() {
            let key = key(inventory, &slot.parts[part]);
            load_state(checkpoint, key, &mut of_parts.optimizer, position)?;
        }
    }
    Ok(())
}

fn key<'a>(inventory: &'a Inventory, part: &Part) -> TensorKey<'a> {
    TensorKey::model(inventory.name(part.param), part.start)
}

fn assign(var: &Var, value: &Tensor) -> candle_core::Result<()> {
    var.set(&moved(value, var.device())?)
}
