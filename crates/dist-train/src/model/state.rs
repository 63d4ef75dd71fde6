//! Saving and loading a model in training.

use dist_checkpoint::{Checkpoint, StateDict};

use crate::{
    error::Result,
    model::{DistributedModel, slot::lock},
    optim::StatefulOptimizer,
    progress::{Progress, TrainerState},
};

impl<M, O: StatefulOptimizer> DistributedModel<M, O> {
    /// Returns the parameters, what the optimizers keep for them, and how far training is, for
    /// [`Checkpoints::save`](crate::Checkpoints::save): each slot of the mesh, in whatever process,
    /// writes its part. Accumulated gradients are not among them.
    ///
    /// It begins with [`check_in_sync`](Self::check_in_sync), so every process of the mesh calls
    /// it.
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`](crate::Error::Optimizer) if an optimizer cannot tell its state,
    /// [`CheckpointError::Kind`](crate::CheckpointError::Kind) if its state has a name that cannot
    /// be written, [`Error::OtherProcess`](crate::Error::OtherProcess) if another process fails, and
    /// those of [`check_in_sync`](Self::check_in_sync).
    pub fn state_dict(&self) -> Result<StateDict> {
        self.check_in_sync()?;
        self.mesh.all_ok(self.state_of_slots())
    }

    fn state_of_slots(&self) -> Result<StateDict> {
        let mut state = StateDict::new(&self.mesh, self.inventory.saved_shapes())
            .with_trainer(&self.rates.state(self.progress))?;
        for (local_slot, slot) in self.slots.iter().enumerate() {
            lock(slot).save(&self.inventory, local_slot, &mut state)?;
        }
        Ok(state)
    }

    /// Gives all parameters and optimizers the values of a checkpoint, whatever number of slots and
    /// layout it was written under, and resumes its count of steps, random numbers and learning
    /// rates; accumulated gradients are dropped. Each slot reads its own items. Every process of the
    /// mesh calls this, with the same checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`](crate::Error::Parameter) if the checkpoint has other parameters than
    /// the model or lacks some of their items, [`Error::Checkpoint`](crate::Error::Checkpoint) if a
    /// file is damaged or cannot be read, or another process loads another checkpoint,
    /// [`Error::Optimizer`](crate::Error::Optimizer) if an optimizer rejects its state,
    /// [`Error::Tensor`](crate::Error::Tensor) if candle fails,
    /// [`Error::OtherProcess`](crate::Error::OtherProcess) if another process fails. Some parameters
    /// may then be changed, and the model rejects everything but another `load`
    /// ([`TrainingError::HalfUpdated`](crate::TrainingError::HalfUpdated)).
    #[doc(alias = "load_state_dict")]
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.check_fits(&self.mesh, &self.inventory.saved_shapes())?;
        let trainer = checkpoint.trainer::<TrainerState>()?;
        let rates = match &trainer {
            Some(state) => self.rates.resumed(state)?,
            None => self.rates.clone(),
        };
        self.mesh.all_ok(self.load_slots(checkpoint))?;
        self.slots.iter().for_each(|slot| lock(slot).is_half_updated = false);
        self.rates = rates;
        self.progress = if let Some(state) = trainer {
            state.progress
        } else {
            let steps = checkpoint.step();
            Progress { steps, batches: steps, ..self.progress }
        };
        Ok(())
    }

    fn load_slots(&self, checkpoint: &Checkpoint) -> Result<()> {
        // On all slots before the first is read: some would go on with what the others have dropped.
        // One that fails on its way has given some parameters their values and others not.
        self.layout.discard_accumulated();
        for slot in &self.slots {
            let mut slot = lock(slot);
            slot.totals = None;
            slot.is_half_updated = true;
        }
        self.slots.iter().try_for_each(|slot| lock(slot).load(&self.inventory, checkpoint))
    }
}
